"""How much faster than its baseline a cell is, how sure that is, and what may be claimed."""

from collections.abc import Mapping

import numpy as np
from pandas import DataFrame, Series
from scipy.special import stdtr, stdtrit

from vitsweep.results.record import Status
from vitsweep.tables.status import counted, final_status

MIN_BLOCKS = 3
"""Below it no interval is shown: Student's t with one degree of freedom is uselessly wide."""

LEVEL = 0.05
"""A claim needs a Holm-adjusted p-value below it; the interval is the 95 % one."""


def speedup_over(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Compare every cell with its baseline, block by block.

    Within a block baseline and variant ran back to back on one machine, so their ratio is free of
    what differs between blocks. Per block d = log(images/s of the variant / images/s of the
    baseline); this equalises the images of a step. The speedup is exp(mean d), its 95 % interval
    exp(mean d +- t sd(d) / sqrt(blocks)) with Student's t (Gosset 1908), unadjusted. Claims are
    adjusted for all comparisons of the sweep (Holm 1979).

    Args:
        runs: one row per run.
        baselines: cell -> its baseline cell, None where it has none.

    Returns:
        One row per cell: `cell_id, baseline_cell_id, speedup, speedup_low, speedup_high,
        num_blocks` (blocks that hold both), `p_value, p_holm, claim, speedup_note`. `claim` is
        `baseline, faster, slower, no difference shown, too few blocks, unpaired` or empty;
        `speedup_note` says why there is no speedup, or only an unpaired one, although the cell was
        measured.
    """
    cells = list(dict.fromkeys([*runs["cell_id"], *baselines]))
    table = DataFrame({"cell_id": cells}).assign(
        baseline_cell_id=Series([baselines.get(cell) for cell in cells], dtype=object)
    )
    per_block = log_throughput_per_block(counted(runs))
    return (
        table.merge(estimate(log_ratios(per_block, baselines)), on="cell_id", how="left")
        .pipe(_with_unpaired, counted(runs), baselines)
        .pipe(_baseline_is_one, set(per_block["cell_id"]))
        .assign(num_blocks=lambda t: t["num_blocks"].fillna(0).astype(int))
        .assign(p_holm=lambda t: holm(t["p_value"]))
        .assign(claim=claims, speedup_note=lambda t: _notes(t, runs))
    )


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

    Both on the same nodes: the rest of a block that was requeued onto others is no pair with what
    ran before.
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
    """Tell whether one world's nodes hold the other's; unknown ones do."""
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


def _with_unpaired(
    table: DataFrame, runs: DataFrame, baselines: Mapping[str, str | None]
) -> DataFrame:
    """Add the bare ratio of means for cells whose sweep asked for no pairs (`paired` is False).

    Such ratios hold what differs between jobs and nodes too, so there is neither interval nor claim.
    Only runs of one sweep on one kind of device are compared.
    """
    if "paired" not in runs or not len(runs):
        return table
    asked = set(runs.loc[runs["paired"].eq(False), "cell_id"])
    alike = runs.assign(block=runs["device"].astype(str), nodes_used=None)  # a pool per device
    ratios = log_ratios(log_throughput_per_block(alike), baselines)
    bare = np.exp(ratios[ratios["cell_id"].isin(asked)].groupby("cell_id")["log_ratio"].mean())
    return table.assign(speedup=table["speedup"].fillna(table["cell_id"].map(bare)))


def holm(p_values: Series) -> Series:
    """Return Holm's step-down adjusted p-values; missing ones stay missing and do not count."""
    known = p_values.dropna().astype(float).sort_values()
    factors = np.arange(len(known), 0, -1)
    return (known * factors).cummax().clip(upper=1.0).reindex(p_values.index)


def _two_sided(mean: Series, error: Series, num_blocks: Series) -> Series:
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = (mean / error).abs().where(error > 0, np.where(mean == 0, 0.0, np.inf))
    return Series(2 * stdtr(num_blocks - 1.0, -statistic), index=mean.index)


def _baseline_is_one(table: DataFrame, measured: set[str]) -> DataFrame:
    is_baseline = table["cell_id"] == table["baseline_cell_id"]
    speedup = table["speedup"].mask(is_baseline & table["cell_id"].isin(measured), 1.0)
    return table.assign(speedup=speedup)


def claims(table: DataFrame) -> Series:
    """Return what may be claimed of each row: see `speedup_over`."""
    shown = table["speedup"].notna()
    rules = [
        table["cell_id"] == table["baseline_cell_id"],
        ~shown,
        table["num_blocks"] == 0,
        table["num_blocks"] < MIN_BLOCKS,
        ~(table["p_holm"] < LEVEL),
        table["speedup"] > 1,
    ]
    claims = ["baseline", "", "unpaired", "too few blocks", "no difference shown", "faster"]
    return Series(np.select(rules, claims, default="slower"), index=table.index)


def _notes(table: DataFrame, runs: DataFrame) -> Series:
    status = final_status(runs).set_index("cell_id")["status"].map(str).to_dict()

    def note(cell: str, baseline: str | None, speedup: float, pairs: int) -> str:
        compared = isinstance(baseline, str) and baseline != cell and not pairs
        if not compared or status.get(cell) != Status.measured:
            return ""
        if speedup == speedup:
            return f"unpaired: its baseline {baseline} ran in other jobs"
        ended = status.get(str(baseline), "never run")
        if ended != Status.measured:
            return f"no speedup: its baseline {baseline} is {ended.replace('_', ' ')}"
        return f"no speedup: it never shared a block with its baseline {baseline}"

    columns = (table[c] for c in ("cell_id", "baseline_cell_id", "speedup", "num_blocks"))
    return Series([note(*row) for row in zip(*columns, strict=True)], index=table.index, dtype=str)
