"""What each technique brings: alone, and on top of those before it."""

from collections.abc import Mapping
from typing import Any

from pandas import DataFrame

from vitsweep.results.record import Status
from vitsweep.tables.cells import cells
from vitsweep.tables.changes import Changes, named, with_changes
from vitsweep.tables.speedup import speedup_over

COLUMNS = [
    "baseline_cell_id",
    "kind",
    "position",
    "added",
    "cell_id",
    "status",
    "images_per_second",
    "throughput_spread",
    "speedup",
    "speedup_low",
    "speedup_high",
    "claim",
    "num_pairs",
    "gain",
    "gain_low",
    "gain_high",
    "gain_claim",
]


def waterfall(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return the techniques one at a time and the longest cumulative order, per baseline.

    `kind` is `alone` (one change against the baseline) or `cumulative` (each row keeps the changes
    of the row above and adds `added`; position 0 is the baseline). `speedup` is over the baseline,
    `gain` over the row above, each paired within blocks with its own interval and claim. Speedups
    of a cumulative order are settings against one baseline, not factors to multiply. A technique that
    was not measured keeps its row and says its `status`.
    """
    table = with_changes(cells(runs, baselines))
    rows = [
        row for _, group in table.groupby("baseline_cell_id", sort=False) for row in _steps(group)
    ]
    steps = DataFrame(rows, columns=["cell_id", "kind", "position", "added", "previous"])
    before = dict(zip(steps["cell_id"], steps["previous"], strict=True))
    gains = speedup_over(runs, before).rename(
        columns={"speedup": "gain", "speedup_low": "gain_low", "speedup_high": "gain_high"}
    )[["cell_id", "gain", "gain_low", "gain_high", "claim"]]
    return (
        steps.merge(table, on="cell_id")
        .merge(gains.rename(columns={"claim": "gain_claim"}), on="cell_id")
        .reindex(columns=COLUMNS)
    )


def longest_chain(sets: list[Changes]) -> list[Changes]:
    """Return the longest sequence in which every set holds the one before, shortest sets first."""
    best: dict[Changes, list[Changes]] = {}
    for current in sorted(dict.fromkeys(sets), key=len):
        below = [best[s] for s in best if s < current]
        best[current] = [*max(below, key=len, default=[]), current]
    return max(best.values(), key=len, default=[])


def _steps(group: DataFrame) -> list[tuple[Any, ...]]:
    by_changes = dict(zip(group["changes"], group["cell_id"], strict=True))
    baseline = group["baseline_cell_id"].iloc[0]
    alone = [
        (cell, "alone", i, named(c), baseline)
        for i, (c, cell) in enumerate(by_changes.items())
        if len(c) == 1
    ]
    measured = group[group["status"] == Status.measured]
    chain = longest_chain(list(measured["changes"]))
    if len(chain) < 3:  # the baseline and one technique: the same as alone
        return alone
    pairs = zip([frozenset[str](), *chain], chain, strict=False)
    return alone + [
        (by_changes[new], "cumulative", i, named(new - old), by_changes.get(old, baseline))
        for i, (old, new) in enumerate(pairs)
    ]
