"""Ratios within blocks: per block, over all blocks of a cell, and between cells that share none."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, nan, sqrt

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Series
from scipy.special import stdtr, stdtrit

from vitsweep.spec.measurement import MIN_BLOCKS as MIN_BLOCKS  # for the tables that use ratios

Floats = NDArray[np.float64]

LEVEL = 0.05
"""A claim needs a Holm-adjusted p-value below it; the interval is the 95 % one."""

BLOCK = ["sweep", "device", "block"]
"""Columns that identify a block. Runs of one block on different devices are never compared."""


def log_throughput_per_block(runs: DataFrame) -> DataFrame:
    """Return `cell_id, sweep, device, block, log_throughput, nodes_used`: a row per cell and block.

    Runs without a throughput above zero are left out.
    """
    throughput = runs["images_per_second"].to_numpy(float, na_value=np.nan)
    usable = runs[np.isfinite(throughput) & (throughput > 0)]
    unknown = {c: v for c, v in (("nodes_used", None), ("device", "")) if c not in usable}
    table = usable.assign(
        log_throughput=np.log(usable["images_per_second"].astype(float)), **unknown
    )
    device = table["device"].astype(object).where(table["device"].notna(), "")
    return (
        table.assign(device=device)
        .groupby(["cell_id", *BLOCK], observed=True, sort=False)
        .agg(log_throughput=("log_throughput", "mean"), nodes_used=("nodes_used", "first"))
        .reset_index()
    )


def log_ratios(per_block: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return `cell_id, sweep, device, block, log_ratio` of blocks with a variant and its baseline.

    Both must have run on the same device and on the same nodes: when a block is requeued onto other
    nodes, its remaining runs do not pair with those before.
    """
    variant = per_block.assign(
        baseline_cell_id=per_block["cell_id"].map(lambda c: baselines.get(c)).astype(object)
    )
    different = variant["baseline_cell_id"].notna() & (
        variant["baseline_cell_id"] != variant["cell_id"].astype(object)
    )
    base = per_block.rename(
        columns={
            "cell_id": "baseline_cell_id",
            "log_throughput": "log_baseline",
            "nodes_used": "nodes_of_baseline",
        }
    ).astype({"baseline_cell_id": object})
    both = variant[different].merge(base, on=["baseline_cell_id", *BLOCK])
    together = map(share_nodes, both["nodes_used"], both["nodes_of_baseline"])
    return both[np.fromiter(together, bool, len(both))].assign(
        log_ratio=lambda t: t["log_throughput"] - t["log_baseline"]
    )


def share_nodes(left: object, right: object) -> bool:
    """Return whether one list of nodes contains the other; an unknown list counts as the same."""
    if not isinstance(left, str) or not isinstance(right, str) or left == right:
        return True
    a, b = set(left.split(",")), set(right.split(","))
    return a <= b or b <= a


def estimate(ratios: DataFrame, key: str = "cell_id") -> DataFrame:
    """Return `cell_id, num_blocks, speedup, speedup_low, speedup_high, p_value` from log ratios.

    Interval and p-value are empty below `MIN_BLOCKS` blocks.

    Args:
        ratios: rows `<key>, log_ratio`.
        key: column that identifies what is estimated.
    """
    groups = ratios.groupby(key, sort=False, observed=True)["log_ratio"]
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
    return Series(adjusted(p_values.to_numpy(float, na_value=np.nan))[0], p_values.index)


def holm_level(p_values: Series) -> Series:
    """Return the level at which Holm's procedure tests each p-value.

    The interval with this error is the one that belongs to the claim: it excludes 1 exactly where
    the adjusted p-value is below `LEVEL`. With m p-values, the i-th smallest is tested at LEVEL / (m - i + 1)
    until one is not rejected; that one and all larger ones at the same level.
    """
    return Series(adjusted(p_values.to_numpy(float, na_value=np.nan))[1], p_values.index)


def adjusted(p_values: Floats) -> tuple[Floats, Floats]:
    """Return `holm` and `holm_level` of an array of p-values; NaN where a p-value is NaN."""
    order = np.argsort(p_values, kind="stable")  # NaN last
    known = p_values[order[: np.count_nonzero(~np.isnan(p_values))]]
    left = np.arange(len(known), 0, -1)
    found = np.full((2, len(p_values)), np.nan)
    found[0, : len(known)] = np.minimum(np.maximum.accumulate(known * left), 1.0)
    accepted = np.flatnonzero(known * left >= LEVEL)
    if len(accepted):
        left[accepted[0] :] = left[accepted[0]]
    found[1, : len(known)] = LEVEL / left
    unsorted = np.empty_like(found)
    unsorted[:, order] = found
    return unsorted[0], unsorted[1]


def interval(table: DataFrame, level: "Series | float", blocks: str = "num_blocks") -> DataFrame:
    """Return `low, high`: the interval of each row at another error level than `LEVEL`.

    Args:
        table: `speedup, speedup_low, speedup_high` at `LEVEL`, and the number of blocks.
        level: probability that the interval misses the truth, per row.
        blocks: column with the number of blocks.
    """
    degrees = table[blocks].astype(float) - 1.0
    middle = np.log(table["speedup"].astype(float))
    half = np.log(table["speedup_high"].astype(float)) - middle
    with np.errstate(invalid="ignore"):
        half = half / stdtrit(degrees, 1 - LEVEL / 2) * stdtrit(degrees, 1 - level / 2)
    return DataFrame({"low": np.exp(middle - half), "high": np.exp(middle + half)})


def _two_sided(mean: Series, error: Series, num_blocks: Series) -> Series:
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = (mean / error).abs().where(error > 0, np.where(mean == 0, 0.0, np.inf))
    return Series(2 * stdtr(num_blocks - 1.0, -statistic), index=mean.index)


@dataclass(frozen=True)
class Sample:
    """Mean, variance and number of a cell's log ratios."""

    mean: float
    variance: float
    num_blocks: int


def samples(ratios: DataFrame) -> dict[str, Sample]:
    """Return the sample of every cell: rows `cell_id, log_ratio`, grouped once for many contrasts."""
    groups = ratios.groupby("cell_id", sort=False, observed=True)["log_ratio"]
    columns = groups.mean(), groups.var(), groups.count()
    return {
        str(cell): Sample(float(mean), float(variance), int(count))
        for cell, mean, variance, count in zip(columns[0].index, *columns, strict=True)
    }


def contrast(
    weights: Mapping[str, float],
    ratios: "DataFrame | Mapping[str, Sample]",
    baseline: str | None = None,
) -> dict[str, float]:
    """Return exp(sum of weight x mean log ratio) over cells, as a row like those of `estimate`.

    The log ratios of a cell are over its baseline in its own blocks, so differences between blocks
    have cancelled; the cells are then independent samples, and the interval is Welch's
    (Satterthwaite's degrees of freedom). A gain is `{new: 1, old: -1}`.

    Args:
        weights: cell -> weight.
        ratios: rows `cell_id, log_ratio`, as `log_ratios` returns them, or their `samples`.
        baseline: the cell whose log ratio is 0 without error by definition. Another cell without
            a ratio (it shared no block with its baseline) makes the whole row missing.
    """
    known = ratios if isinstance(ratios, Mapping) else samples(ratios)
    used = {cell: known[cell] for cell in weights if cell in known}
    unknown = [cell for cell in weights if cell not in known and cell != baseline]
    if unknown or not used:
        return dict.fromkeys(("speedup", "speedup_low", "speedup_high", "p_value"), nan) | {
            "num_blocks": 0.0
        }
    middle = sum(weights[cell] * sample.mean for cell, sample in used.items())
    num_blocks = min(sample.num_blocks for sample in used.values())
    row = {"num_blocks": float(num_blocks), "speedup": exp(middle)}
    if num_blocks < MIN_BLOCKS:
        return row | {"speedup_low": nan, "speedup_high": nan, "p_value": nan}
    error, degrees = _error(weights, used)
    half = float(stdtrit(degrees, 1 - LEVEL / 2)) * error
    p_value = 2 * float(stdtr(degrees, -abs(middle) / error)) if error else float(middle == 0)
    ends = {"speedup_low": exp(middle - half), "speedup_high": exp(middle + half)}
    return row | ends | {"p_value": p_value}


def _error(weights: Mapping[str, float], used: Mapping[str, Sample]) -> tuple[float, float]:
    """Return standard error and degrees of freedom of the weighted sum."""
    parts = {c: weights[c] ** 2 * s.variance / s.num_blocks for c, s in used.items()}
    total = sum(parts.values())
    spread = sum(part**2 / (used[c].num_blocks - 1) for c, part in parts.items())
    return sqrt(total), total**2 / spread if spread else 1.0


def selection_adjusted(ratios: DataFrame) -> float:
    """Return the speedup of the best of several cells, without the bias of having selected it.

    The largest of many equal estimates is above 1 by chance alone. Here the choice and the estimate
    use different blocks: for every block, the best cell is chosen by the other blocks, and its ratio
    in this block counts (cross-validation of a selection: Stone 1974; Tibshirani and Tibshirani 2009).
    Where one cell is best in any case, the figure is its plain speedup. NaN where no block is left.

    Args:
        ratios: rows `cell_id, sweep, device, block, log_ratio` of the cells that are compared.
    """
    return SelectionAdjustment(ratios).of(set(ratios["cell_id"]))


class SelectionAdjustment:
    """`selection_adjusted` for many sets of cells, from one table of log ratios."""

    def __init__(self, ratios: DataFrame) -> None:
        names, codes = np.unique(ratios["cell_id"].to_numpy(str), return_inverse=True)
        by_cell = np.argsort(codes, kind="stable")
        self._code = {str(name): code for code, name in enumerate(names)}
        self._first_row = np.searchsorted(codes[by_cell], np.arange(len(names) + 1))
        self._cell = codes[by_cell]
        blocks = ratios.groupby(BLOCK, observed=True, sort=False).ngroup().to_numpy()
        self._block = blocks[by_cell]
        self._log = ratios["log_ratio"].to_numpy(float)[by_cell]

    def of(self, cells: Iterable[str]) -> float:
        """Return the figure for the best of some cells."""
        codes = sorted(self._code[str(cell)] for cell in cells if str(cell) in self._code)
        slices = [np.arange(*self._first_row[code : code + 2]) for code in codes]
        if not slices:
            return nan
        used = np.concatenate(slices)
        cell = np.unique(self._cell[used], return_inverse=True)[1]
        block, logs = self._block[used], self._log[used]
        count, total = np.bincount(cell), np.bincount(cell, weights=logs)
        order = np.argsort(-total / np.maximum(count, 1), kind="stable")
        kept = []
        by_block = np.argsort(block, kind="stable")
        for every in np.split(by_block, np.flatnonzero(np.diff(block[by_block])) + 1):
            rows = every[count[cell[every]] > 1]
            if not len(rows):
                continue
            members = cell[rows]
            without = (total[members] - logs[rows]) / (count[members] - 1)
            best = int(without.argmax())
            # a cell that has no run in this block may be better still: then nothing is learnt here
            first = order[: len(every) + 1]
            others = first[~np.isin(first, cell[every])]
            if not len(others) or total[others[0]] / count[others[0]] <= without[best]:
                kept.append(logs[rows[best]])
        return exp(float(np.mean(kept))) if kept else nan
