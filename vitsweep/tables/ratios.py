"""Ratios within blocks: per block, over all blocks of a cell, and between cells that share none."""

from collections.abc import Mapping
from math import exp, nan, sqrt

import numpy as np
from pandas import DataFrame, Series
from scipy.special import stdtr, stdtrit

MIN_BLOCKS = 3
"""With fewer blocks no interval is shown: Student's t with one degree of freedom is too wide."""

LEVEL = 0.05
"""A claim needs a Holm-adjusted p-value below it; the interval is the 95 % one."""


def log_throughput_per_block(runs: DataFrame) -> DataFrame:
    """Return `cell_id, sweep, block, log_throughput, nodes_used`: one row per cell and block."""
    throughput = runs["images_per_second"].astype(float)
    usable = runs[np.isfinite(throughput) & (throughput > 0)]
    known = {"nodes_used": None} if "nodes_used" not in usable else {}
    return (
        usable.assign(log_throughput=np.log(usable["images_per_second"].astype(float)), **known)
        .groupby(["cell_id", "sweep", "block"], observed=True, sort=False)
        .agg(log_throughput=("log_throughput", "mean"), nodes_used=("nodes_used", "first"))
        .reset_index()
    )


def log_ratios(per_block: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return `cell_id, block, log_ratio` for every block that holds a variant and its baseline.

    Both must have run on the same nodes: when a block is requeued onto other nodes, its remaining
    runs do not pair with those before.
    """
    variant = per_block.assign(
        baseline_cell_id=per_block["cell_id"].map(lambda c: baselines.get(c))
    )
    variant = variant[variant["baseline_cell_id"] != variant["cell_id"]]
    base = per_block.rename(
        columns={
            "cell_id": "baseline_cell_id",
            "log_throughput": "log_baseline",
            "nodes_used": "nodes_of_baseline",
        }
    )
    both = variant.merge(base, on=["baseline_cell_id", "sweep", "block"])
    together = map(_share_nodes, both["nodes_used"], both["nodes_of_baseline"])
    return both[np.fromiter(together, bool, len(both))].assign(
        log_ratio=lambda t: t["log_throughput"] - t["log_baseline"]
    )


def _share_nodes(left: object, right: object) -> bool:
    """Return whether one list of nodes contains the other; an unknown list counts as the same."""
    if not isinstance(left, str) or not isinstance(right, str) or left == right:
        return True
    a, b = set(left.split(",")), set(right.split(","))
    return a <= b or b <= a


def estimate(ratios: DataFrame) -> DataFrame:
    """Return `cell_id, num_blocks, speedup, speedup_low, speedup_high, p_value` from log ratios.

    Interval and p-value are empty below `MIN_BLOCKS` blocks.
    """
    groups = ratios.groupby("cell_id", sort=False, observed=True)["log_ratio"]
    mean, num_blocks = groups.mean(), groups.count()
    error: Series = groups.std() / np.sqrt(num_blocks)
    enough = num_blocks >= MIN_BLOCKS
    half_width = (error * stdtrit(num_blocks - 1.0, 1 - LEVEL / 2)).where(enough)
    return DataFrame(
        {
            "num_blocks": num_blocks,
            "speedup": np.exp(mean),
            "speedup_low": np.exp(mean - half_width),
            "speedup_high": np.exp(mean + half_width),
            "p_value": _two_sided(mean, error, num_blocks).where(enough),
        }
    ).reset_index()


def holm(p_values: Series) -> Series:
    """Return Holm's step-down adjusted p-values; missing ones stay missing and do not count."""
    known = p_values.dropna().astype(float).sort_values()
    factors = np.arange(len(known), 0, -1)
    return (known * factors).cummax().clip(upper=1.0).reindex(p_values.index)


def _two_sided(mean: Series, error: Series, num_blocks: Series) -> Series:
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = (mean / error).abs().where(error > 0, np.where(mean == 0, 0.0, np.inf))
    return Series(2 * stdtr(num_blocks - 1.0, -statistic), index=mean.index)


def contrast(weights: Mapping[str, float], ratios: DataFrame) -> dict[str, float]:
    """Return exp(sum of weight x mean log ratio) over cells, as a row like those of `estimate`.

    The log ratios of a cell are over its baseline in its own blocks, so differences between blocks
    have cancelled; the cells are then independent samples, and the interval is Welch's
    (Satterthwaite's degrees of freedom). A gain is `{new: 1, old: -1}`. A baseline itself has no
    ratios: its log is 0 without error.

    Args:
        weights: cell -> weight.
        ratios: rows `cell_id, log_ratio`, as `log_ratios` returns them.
    """
    groups = {cell: ratios.loc[ratios["cell_id"] == cell, "log_ratio"] for cell in weights}
    used = {cell: values for cell, values in groups.items() if len(values)}
    middle = sum(weights[cell] * float(values.mean()) for cell, values in used.items())
    num_blocks = min((len(values) for values in used.values()), default=0)
    row = {"num_blocks": float(num_blocks), "speedup": exp(middle) if used else nan}
    if num_blocks < MIN_BLOCKS:
        return row | {"speedup_low": nan, "speedup_high": nan, "p_value": nan}
    error, degrees = _error(weights, used)
    half = float(stdtrit(degrees, 1 - LEVEL / 2)) * error
    p_value = 2 * float(stdtr(degrees, -abs(middle) / error)) if error else float(middle == 0)
    ends = {"speedup_low": exp(middle - half), "speedup_high": exp(middle + half)}
    return row | ends | {"p_value": p_value}


def _error(
    weights: Mapping[str, float], groups: Mapping[str, "Series[float]"]
) -> tuple[float, float]:
    """Return standard error and degrees of freedom of the weighted sum."""
    parts = {cell: weights[cell] ** 2 * float(v.var()) / len(v) for cell, v in groups.items()}
    total = sum(parts.values())
    spread = sum(part**2 / (len(groups[cell]) - 1) for cell, part in parts.items())
    return sqrt(total), total**2 / spread if spread else 1.0
