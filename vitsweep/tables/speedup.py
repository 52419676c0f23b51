"""The speedup of every cell over its baseline, with interval and claim."""

from collections.abc import Mapping

import numpy as np
from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.ratios import (
    LEVEL,
    MIN_BLOCKS,
    estimate,
    holm,
    log_ratios,
    log_throughput_per_block,
)
from vitsweep.tables.status import counted, final_status


def speedup_over(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Compare every cell with its baseline, block by block.

    Within a block, baseline and variant ran back to back on one machine, so differences between
    blocks cancel in their ratio. Per block d = log(images/s of the variant / images/s of the
    baseline); images/s also compares cells with different images per step. The speedup is
    exp(mean d), its 95 % interval exp(mean d +- t sd(d) / sqrt(blocks)) with Student's t (Gosset
    1908), unadjusted. Claims are adjusted for all comparisons of the sweep (Holm 1979).

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


def _with_unpaired(
    table: DataFrame, runs: DataFrame, baselines: Mapping[str, str | None]
) -> DataFrame:
    """Add the bare ratio of means for cells that were measured without pairing (`paired` is False).

    Such ratios include differences between jobs and nodes, so there is neither interval nor claim.
    Only runs of one sweep on one kind of device are compared.
    """
    if "paired" not in runs or not len(runs):
        return table
    unpaired = set(runs.loc[runs["paired"].eq(False), "cell_id"])
    alike = runs.assign(block=runs["device"].astype(str), nodes_used=None)  # a pool per device
    ratios = log_ratios(log_throughput_per_block(alike), baselines)
    bare = np.exp(ratios[ratios["cell_id"].isin(unpaired)].groupby("cell_id")["log_ratio"].mean())
    return table.assign(speedup=table["speedup"].fillna(table["cell_id"].map(bare)))


def _baseline_is_one(table: DataFrame, measured: set[str]) -> DataFrame:
    is_baseline = table["cell_id"] == table["baseline_cell_id"]
    speedup = table["speedup"].mask(is_baseline & table["cell_id"].isin(measured), 1.0)
    return table.assign(speedup=speedup)


def claims(table: DataFrame) -> Series:
    """Return the claim of each row, see `speedup_over`."""
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
        other = status.get(str(baseline), "never run")
        if other != Status.measured:
            return f"no speedup: its baseline {baseline} is {other.replace('_', ' ')}"
        return f"no speedup: it never shared a block with its baseline {baseline}"

    columns = (table[c] for c in ("cell_id", "baseline_cell_id", "speedup", "num_blocks"))
    return Series([note(*row) for row in zip(*columns, strict=True)], index=table.index, dtype=str)
