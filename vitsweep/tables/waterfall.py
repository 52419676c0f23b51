"""The effect of each technique alone, and of techniques added one after the other."""

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.blocks import ROW, log_ratios, log_throughput_per_block
from vitsweep.tables.cells import cells
from vitsweep.tables.names import Changes, named, with_changes
from vitsweep.tables.stats import claims, contrast, estimate, holm, samples
from vitsweep.tables.valid_runs import (
    KEY,
    KeyedRuns,
    checked_runs,
    counted,
    keyed,
    one_device_each,
    text,
)

COLUMNS = (
    "baseline_cell_id kind position added cell_id status images_per_second throughput_spread "
    "speedup speedup_low speedup_high claim num_pairs gain gain_low gain_high gain_claim sweep device"
).split()
NAMES = {"speedup": "gain", "speedup_low": "gain_low", "speedup_high": "gain_high"}


def waterfall(
    runs: DataFrame,
    baselines: Mapping[str, str | None],
    mixed_hardware: bool = False,
    cells_: DataFrame | None = None,
) -> DataFrame:
    """Return the techniques one at a time and the longest cumulative sequence, per baseline.

    `kind` is `alone` (one change against the baseline) or `cumulative` (each row keeps the changes
    of the row above and adds `added`; position 0 is the baseline). `speedup` is over the baseline,
    `gain` over the row above, each with its own interval and claim: paired where both shared
    blocks, else by way of the baseline (see `contrast`). The speedups of a cumulative sequence all
    divide by one baseline: they are not factors to multiply. A technique that was not measured
    keeps its row with its `status`.

    Args:
        runs: one row per run.
        baselines: cell -> its baseline cell, or None.
        mixed_hardware: compare cells of different devices.
        cells_: one row per cell of these runs, where it is there already.

    Raises:
        VitsweepError: cells of one baseline ran on different devices (unless `mixed_hardware`).
    """
    checked = checked_runs(runs, "device")
    known = keyed(checked, baselines)
    every = cells(checked, baselines) if cells_ is None else cells_
    table = _keyed_cells(one_device_each(every, mixed_hardware), known)
    groups = table.groupby("_baseline", sort=False)
    rows = [row for _, group in groups for row in _steps(group)]
    steps = DataFrame(rows, columns=["_key", "kind", "position", "added", "previous"])
    gains = _gains(steps, known)
    return steps.merge(table, on="_key").merge(gains, on=["_key", "kind"]).reindex(columns=COLUMNS)


def _keyed_cells(cells_: DataFrame, known: KeyedRuns) -> DataFrame:
    """Add `changes`, `_key` (the number of the row) and `_baseline` (that of its baseline).

    A cell whose baseline ran on another device only stands beside the baseline there.
    """
    rows = known.numbers(cells_)
    base = rows.map(known.rows["baseline"])
    table = with_changes(cells_.assign(_key=rows, _baseline=base))
    cell, sweep = (text(table, c) for c in ("cell_id", KEY[1]))
    elsewhere = dict(zip(zip(cell, sweep, strict=True), table["_key"], strict=True))
    wanted = zip(text(table, "baseline_cell_id"), sweep, strict=True)
    nearest = Series([elsewhere.get(key) for key in wanted], table.index, dtype=float)
    has_row = table["_baseline"].isin(set(table["_key"]))
    return table.assign(_baseline=table["_baseline"].where(has_row | nearest.isna(), nearest))


def longest_sequence(sets: list[Changes]) -> list[Changes]:
    """Return the longest sequence in which every set holds the one before, shortest sets first."""
    best: dict[Changes, list[Changes]] = {}
    place: dict[Changes, int] = {}
    for current in sorted(dict.fromkeys(sets), key=len):
        below = [best[s] for s in sorted(_subsets(current, place), key=place.__getitem__)]
        best[current] = [*max(below, key=len, default=[]), current]
        place[current] = len(place)
    return max(best.values(), key=len, default=[])


def _subsets(changes: Changes, known: Mapping[Changes, int]) -> Iterator[Changes]:
    """Yield the known proper subsets: by enumeration where these are fewer than the known sets."""
    if 2 ** len(changes) > len(known):
        yield from (s for s in known if s < changes)
        return
    sizes = range(len(changes))
    some = (frozenset(chosen) for size in sizes for chosen in combinations(sorted(changes), size))
    yield from (s for s in some if s in known)


def _gains(steps: DataFrame, known: KeyedRuns) -> DataFrame:
    """Return the gain of every step over the one before; everything is grouped once."""
    per_block = log_throughput_per_block(counted(known.runs, ROW), ROW)
    over_baseline = samples(log_ratios(per_block, known.baselines, ROW), ROW)
    measured = set(per_block[ROW])
    rows: list[Mapping[Any, Any]] = []
    for _, some in steps.groupby("kind", sort=False):
        previous = dict(zip(some["_key"], some["previous"], strict=True))
        paired = estimate(log_ratios(per_block, previous, ROW), ROW).set_index(ROW).to_dict("index")
        for new, old in previous.items():
            if new == old:
                rows.append({"speedup": 1.0 if new in measured else None, "num_blocks": 0.0})
            else:
                weights = {new: 1.0, old: -1.0}
                base = known.baselines.get(new)
                rows.append(paired.get(new) or contrast(weights, over_baseline, base))
    order = steps.groupby("kind", sort=False).ngroup().sort_values(kind="stable").index
    columns = ["num_blocks", "speedup", "speedup_low", "speedup_high", "p_value"]
    table = DataFrame(rows, columns=columns, index=order, dtype=float).assign(
        _key=steps["_key"], cell_id=steps["_key"], kind=steps["kind"],
        baseline_cell_id=steps["previous"], num_blocks=lambda t: t["num_blocks"].fillna(0),
    )  # fmt: skip
    adjusted = table.groupby("kind")["p_value"].transform(holm) if len(table) else table["p_value"]
    return (
        table.assign(p_holm=adjusted)
        .assign(gain_claim=claims)
        .rename(columns=NAMES)[["_key", "kind", *NAMES.values(), "gain_claim"]]
    )


def _steps(group: DataFrame) -> list[tuple[Any, ...]]:
    by_changes = dict(zip(group["changes"], group["_key"], strict=True))
    baseline = group["_baseline"].iloc[0]
    alone = [
        (cell, "alone", i, named(c), baseline)
        for i, (c, cell) in enumerate(by_changes.items())
        if len(c) == 1
    ]
    measured = group[group["status"] == Status.measured]
    sequence = longest_sequence(list(measured["changes"]))
    if len(sequence) < 3:  # the baseline and one technique: the same as alone
        return alone
    pairs = zip([frozenset[str](), *sequence], sequence, strict=False)
    return alone + [
        (by_changes[new], "cumulative", i, named(new - old), by_changes.get(old, baseline))
        for i, (old, new) in enumerate(pairs)
    ]
