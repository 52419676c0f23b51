"""Interactions of pairs of techniques: is the speedup of both the product of their speedups?"""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.tables.blocks import BLOCK, log_ratios, log_throughput_per_block
from vitsweep.tables.stats import LEVEL, MIN_BLOCKS, contrast, estimate, holm, samples
from vitsweep.tables.valid_runs import counted
from vitsweep.tables.waterfall import compared_cells

WEIGHTS = {"cell_id": 1.0, "first_cell": -1.0, "second_cell": -1.0}
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
    table, apart, of_key = compared_cells(runs, baselines, mixed_hardware)
    pairs = [row for _, g in table.groupby("_baseline", sort=False) for row in _pairs(g)]
    halves = DataFrame(pairs, columns=HALVES)
    ratios = log_ratios(log_throughput_per_block(counted(apart)), of_key)
    estimates = _estimates(halves, ratios)
    speedups = table.set_index("_key")["speedup"]
    names = dict(zip(table["_key"], table["cell_id"], strict=True))
    return (
        halves.join(estimates.rename(columns=ESTIMATE))
        .assign(
            speedup_first=lambda t: t["first_cell"].map(speedups),
            speedup_second=lambda t: t["second_cell"].map(speedups),
            expected=lambda t: t["speedup_first"] * t["speedup_second"],
            speedup_both=lambda t: t["cell_id"].map(speedups),
            p_holm=lambda t: holm(t["p_value"]),
            claim=_claims,
            cell_id=lambda t: t["cell_id"].map(names),
            baseline_cell_id=lambda t: t["baseline_cell_id"].map(names),
        )
        .drop(columns=["first_cell", "second_cell"])
    )


def _pairs(group: DataFrame) -> list[tuple[str, ...]]:
    """Return the cells that change two settings and whose two halves are in the table as well."""
    cell = dict(zip(group["changes"], group["_key"], strict=True))
    base = group["_baseline"].iloc[0]
    single = {
        change: frozenset([change]) for changes in cell if len(changes) == 1 for change in changes
    }
    known = set(single)
    pairs = sorted(sorted(both) for both in cell if len(both) == 2 and both <= known)
    return [
        (cell[frozenset((a, b))], a, b, cell[single[a]], cell[single[b]], base) for a, b in pairs
    ]


def _estimates(halves: DataFrame, ratios: DataFrame) -> DataFrame:
    """Return `estimate` of every interaction: within shared blocks, else by `contrast`."""
    parts = [
        DataFrame({"cell_id": halves[column], "_pair": halves.index, "weight": weight})
        for column, weight in WEIGHTS.items()
    ]
    terms = pd.concat(parts).merge(ratios[["cell_id", *BLOCK, "log_ratio"]], on="cell_id")
    blocks = (
        terms.assign(log_ratio=terms["weight"] * terms["log_ratio"])
        .groupby(["_pair", *BLOCK], sort=False, observed=True)["log_ratio"]
        .agg(["sum", "count"])
        .query("count == 3")
        .reset_index()
        .rename(columns={"sum": "log_ratio"})
    )
    paired = estimate(blocks, "_pair").set_index("_pair").to_dict("index")
    of_cell = samples(ratios)
    rows = [
        paired.get(pair)
        or contrast({row[c]: w for c, w in WEIGHTS.items()}, of_cell, row["baseline_cell_id"])
        for pair, row in enumerate(halves.to_dict("records"))
    ]
    return DataFrame(rows, columns=list(ESTIMATE), index=halves.index, dtype=float)


def _claims(table: DataFrame) -> Series:
    sure, likely = table["p_holm"] < LEVEL, table["p_value"] < LEVEL
    rules = {
        "": table["interaction"].isna(),
        "too few blocks": table["num_blocks"] < MIN_BLOCKS,
        "help each other": sure & (table["interaction"] > 1),
        "hurt each other": sure,
        "probably help each other": likely & (table["interaction"] > 1),
        "probably hurt each other": likely,
    }
    conditions = [np.asarray(rule, bool) for rule in rules.values()]
    found = np.select(conditions, list(rules), default="no interaction shown")
    return Series(found, index=table.index, dtype=object)
