"""Interactions of pairs of techniques: is the speedup of both the product of their speedups?"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from vitsweep.tables.cells import cells
from vitsweep.tables.names import with_changes
from vitsweep.tables.ratios import (
    LEVEL,
    MIN_BLOCKS,
    contrast,
    estimate,
    holm,
    log_ratios,
    log_throughput_per_block,
)
from vitsweep.tables.status import counted
from vitsweep.tables.tidy import one_device_each

HALVES = ["cell_id", "first", "second", "first_cell", "second_cell", "baseline_cell_id"]
ESTIMATE = {
    "num_blocks": "num_blocks",
    "speedup": "interaction",
    "speedup_low": "interaction_low",
    "speedup_high": "interaction_high",
    "p_value": "p_value",
}


def interactions(
    runs: DataFrame, baselines: Mapping[str, str | None], mixed_hardware: bool = False
) -> DataFrame:
    """Compare the speedup of each pair of techniques with the product of their two speedups.

    Per block d = log s(both) - log s(first) - log s(second), with s the speedup over the baseline
    of that block; `interaction` is exp(mean d): above 1 the two help each other, below 1 they
    hurt each other. Interval and Holm adjustment as in `speedup_over`. Where the four cells never shared a
    block, each is compared with the baseline of its own blocks (see `contrast`).

    Raises:
        VitsweepError: cells of one baseline ran on different devices (unless `mixed_hardware`).
    """
    table = with_changes(one_device_each(cells(runs, baselines), mixed_hardware))
    pairs = [row for _, g in table.groupby("baseline_cell_id", sort=False) for row in _pairs(g)]
    halves = DataFrame(pairs, columns=HALVES)
    ratios = log_ratios(log_throughput_per_block(counted(runs)), baselines)
    rows = [_interaction(row, ratios) for row in halves.to_dict("records")]
    estimates = DataFrame(rows, columns=list(ESTIMATE), index=halves.index, dtype=float)
    speedups = table.set_index("cell_id")["speedup"]
    return (
        halves.join(estimates.rename(columns=ESTIMATE))
        .assign(
            speedup_first=lambda t: t["first_cell"].map(speedups),
            speedup_second=lambda t: t["second_cell"].map(speedups),
            expected=lambda t: t["speedup_first"] * t["speedup_second"],
            speedup_both=lambda t: t["cell_id"].map(speedups),
            p_holm=lambda t: holm(t["p_value"]),
            claim=_claims,
        )
        .drop(columns=["first_cell", "second_cell"])
    )


def _pairs(group: DataFrame) -> list[tuple[str, ...]]:
    cell = dict(zip(group["changes"], group["cell_id"], strict=True))
    base = group["baseline_cell_id"].iloc[0]
    single = sorted(next(iter(c)) for c in cell if len(c) == 1)
    return [
        (cell[both], a, b, cell[frozenset([a])], cell[frozenset([b])], base)
        for a, b in combinations(single, 2)
        if (both := frozenset([a, b])) in cell
    ]


def _interaction(row: Mapping[Any, Any], ratios: DataFrame) -> dict[str, float]:
    weights = {row["cell_id"]: 1.0, row["first_cell"]: -1.0, row["second_cell"]: -1.0}
    mine = ratios[ratios["cell_id"].isin(list(weights))]
    if mine["cell_id"].nunique() < len(weights):
        return {}
    wide = mine.pivot_table(
        index=["sweep", "block"], columns="cell_id", values="log_ratio", observed=True
    )
    together = (wide * Series(weights)).dropna().sum(axis=1)
    if together.empty:
        return contrast(weights, ratios)
    paired = estimate(DataFrame({"cell_id": row["cell_id"], "log_ratio": together}))
    return {str(k): float(v) for k, v in paired.iloc[0].drop("cell_id").items()}


def _claims(table: DataFrame) -> Series:
    rules = [
        table["interaction"].isna(),
        table["num_blocks"] < MIN_BLOCKS,
        ~(table["p_holm"] < LEVEL),
        table["interaction"] > 1,
    ]
    texts = ["", "too few blocks", "no interaction shown", "help each other"]
    return Series(np.select(rules, texts, default="hurt each other"), index=table.index)
