"""Which techniques help or hurt each other."""

from collections.abc import Mapping
from itertools import combinations

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.tables.cells import cells
from vitsweep.tables.changes import with_changes
from vitsweep.tables.speedup import LEVEL, MIN_BLOCKS, estimate, holm, log_throughput_per_block
from vitsweep.tables.status import counted


def interactions(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Compare each pair of techniques with what its two halves promise.

    Per block d = log s(both) - log s(first) - log s(second), with s the speedup over the baseline
    of that block; `interaction` is exp(mean d): above 1 the two help each other, below 1 they
    hurt. Interval and Holm adjustment as in `speedup_over`. Needs blocks that hold all four cells.
    """
    table = with_changes(cells(runs, baselines))
    pairs = [row for _, g in table.groupby("baseline_cell_id", sort=False) for row in _pairs(g)]
    columns = ["cell_id", "first", "second", "first_cell", "second_cell", "baseline_cell_id"]
    halves = DataFrame(pairs, columns=columns)
    speed = log_throughput_per_block(counted(runs)).pivot_table(
        index=["sweep", "block"], columns="cell_id", values="log_throughput", observed=True
    )
    long = pd.concat([_per_block(row, speed) for _, row in halves.iterrows()] or [_NOTHING])
    shown = {"speedup": "interaction", "speedup_low": "interaction_low"}
    estimates = estimate(long.dropna()).rename(columns=shown | {"speedup_high": "interaction_high"})
    speedups = table.set_index("cell_id")["speedup"]
    return (
        halves.merge(estimates, on="cell_id", how="left")
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


_NOTHING = DataFrame({"cell_id": Series(dtype=str), "log_ratio": Series(dtype=float)})


def _pairs(group: DataFrame) -> list[tuple[str, ...]]:
    cell = dict(zip(group["changes"], group["cell_id"], strict=True))
    base = group["baseline_cell_id"].iloc[0]
    single = sorted(next(iter(c)) for c in cell if len(c) == 1)
    return [
        (cell[both], a, b, cell[frozenset([a])], cell[frozenset([b])], base)
        for a, b in combinations(single, 2)
        if (both := frozenset([a, b])) in cell
    ]


def _per_block(row: Series, speed: DataFrame) -> DataFrame:
    both, first, second, base = (
        speed[c] if c in speed else Series(np.nan, index=speed.index)
        for c in row[["cell_id", "first_cell", "second_cell", "baseline_cell_id"]]
    )
    return DataFrame({"cell_id": row["cell_id"], "log_ratio": both - first - second + base})


def _claims(table: DataFrame) -> Series:
    rules = [
        table["interaction"].isna(),
        table["num_blocks"] < MIN_BLOCKS,
        ~(table["p_holm"] < LEVEL),
        table["interaction"] > 1,
    ]
    words = ["", "too few blocks", "no interaction shown", "help each other"]
    return Series(np.select(rules, words, default="hurt each other"), index=table.index)
