"""What each technique brings on average over the other choices, and together with each of them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.blocks import ROW, log_ratios, log_throughput_per_block, within_blocks
from vitsweep.tables.cells import cells
from vitsweep.tables.effect_model import Effect, Factor, Grid, MixedFit, fit_mixed_model
from vitsweep.tables.formatting import plain
from vitsweep.tables.names import Changes, named, names_by_id, varying_columns, with_changes
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import flattered, is_flattered, lost_blocks
from vitsweep.tables.stats import (
    LEVEL,
    MIN_BLOCKS,
    Claim,
    chosen,
    claims,
    contrast,
    estimate,
    half_width,
    holm,
    samples,
    two_sided,
)
from vitsweep.tables.valid_runs import (
    KEY,
    KeyedRuns,
    checked_runs,
    keyed,
    newest_code,
    one_device_each,
    text,
)

Floats = NDArray[np.float64]

COLUMNS = (
    "device kind technique against given effect effect_low effect_high p_value p_holm claim "
    "ratio_to_average ratio_low ratio_high ratio_p_value ratio_p_holm interaction "
    "num_cells num_blocks note"
).split()
BASELINE = "baseline"
"""Factor that tells apart cells with different baselines: other sizes, models, data."""


def effects(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Estimate what every technique brings over a grid of choices, on average and with each choice.

    Model: log(images/s) = block + main effects + two-way interactions + a rest of the cell + noise.
    Effects of blocks are free (the analysis is within blocks); interactions and rests are random,
    their variances estimated by restricted maximum likelihood (Patterson and Thompson 1971), so
    they shrink towards 0 as far as noise explains them (best linear unbiased prediction; Robinson
    1991, Statistical Science 6). A penalty log(standard deviation) keeps variances from an estimate
    of 0 (Chung et al. 2013, Psychometrika 78); a single interaction is not shrunken at all.

    An effect is exp of the mean of mu(technique) - mu(reference) over the other choices with which
    both were measured; the reference is the baselines' choice. Its 95 % interval is Student's t on
    the prediction error of the mean over exactly these combinations, measured or not. What
    noise adds to that error is the spread over blocks of the effect's contrast in each.

    Args:
        runs: one row per run, in the columns of the store.
        baselines: cell -> its baseline, None where it has none.

    Returns:
        One row per effect and kind of device. `kind` is `average` (over the other choices) or
        `given` (with the one choice `given`, over the rest); `technique` and `against` are
        `column=choice`; `effect` is a ratio of throughput (1.31: 31 % more images per second);
        `claim` is `faster`, `slower`, `blocks lost` (see `speedup_over`), `no difference shown`, `too few
        blocks`, or empty where there is no estimate. For `given`, `ratio_to_average` is this effect over
        the average one and `interaction` says `more than on average`, `less than on average` or `no
        interaction shown`.
        p-values are adjusted within each kind (Holm 1979). `num_cells` of the combinations were
        measured, `num_blocks` is the fewest blocks of one of them; `note` says why there is no
        estimate, or what the average leaves out. `attrs["spreads"]`: device -> standard deviations
        of `noise, interaction, rest` (log images/s).

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    runs = checked_runs(runs)
    tables, spreads = [DataFrame(columns=COLUMNS)], {}
    for device, some in by_device(runs):
        table, found = _of_device(some, baselines)
        tables.append(table.assign(device=device))
        spreads[device] = found
    filled = [table for table in tables if len(table)]
    result = pd.concat(filled or tables, ignore_index=True).reindex(columns=COLUMNS)
    result.attrs["spreads"] = spreads
    return result


def by_device(runs: DataFrame) -> Iterator[tuple[str, DataFrame]]:
    """Yield the runs of each kind of device; runs that do not say belong together."""
    devices = text(runs, "device")
    yield from ((str(name), some) for name, some in runs.groupby(devices, sort=False))


def _of_device(
    runs: DataFrame, baselines: Mapping[str, str | None]
) -> tuple[DataFrame, dict[str, float]]:
    data = within_blocks(runs)
    latest = runs.drop_duplicates("cell_id", keep="last").set_index("cell_id", drop=False)
    grid = _grid(latest.loc[data.cells].reset_index(drop=True), baselines)
    if not grid.factors or not len(data.spectrum[0]):  # no two cells, or none shared a block
        return DataFrame(columns=COLUMNS), {}
    fit = fit_mixed_model(data, grid.main, grid.both)
    rows = [row for column in grid.factors if column != BASELINE for row in _rows(column, grid)]
    told, found, averages = zip(*rows, strict=True)
    table = DataFrame(told).join(_estimated(found, averages, fit, data.num_blocks))
    lost, names = lost_blocks(newest_code(runs)), np.array(data.cells)
    sides = [
        e is not None and is_flattered(lost, names[e.cells * sign > 0], names[e.cells * sign < 0])
        for e, sign in zip(found, np.where(table["effect"] > 1, 1, -1), strict=True)
    ]
    return _claimed(table.assign(_flattered=sides)).drop(columns="_flattered"), fit.spreads


def _grid(cells: DataFrame, baselines: Mapping[str, str | None]) -> Grid:
    """Return what varies among the cells of one baseline, and the baselines as a factor."""
    if cells.empty:
        return Grid({})
    stratum = cells["cell_id"].map(lambda c: baselines.get(c) or "").astype(str)
    is_baseline = stratum == cells["cell_id"]
    factors = {}
    for column in varying_columns(cells):
        texts = cells[column].map(plain).astype(str)
        if (texts.groupby(stratum).nunique() > 1).any():
            usual = texts[is_baseline] if is_baseline.any() else texts
            factors[column] = Factor.of(texts, str(usual.value_counts().index[0]))
    if factors and stratum.nunique() > 1:
        ids = list(dict.fromkeys(stratum))
        own = cells[is_baseline]  # named by what tells the baselines apart
        names = names_by_id(own)
        codes = stratum.map(ids.index).to_numpy(np.int64)
        factors[BASELINE] = Factor([str(names.get(i, i)) for i in ids], 0, codes)
    return Grid(factors)


Row = tuple[dict[str, Any], Effect | None, Effect | None]


def _rows(column: str, grid: Grid) -> Iterator[Row]:
    """Yield what a row says, its effect where the data can tell it, and the effect on average."""
    factor, others = grid.factors[column], [c for c in grid.factors if c != column]
    for level, name in enumerate(factor.names):
        if level == factor.reference:
            continue
        against = f"{column}={factor.names[factor.reference]}"
        told = {"technique": f"{column}={name}", "against": against}
        shared = {o: grid.measured_with_both(column, level, o) for o in others}
        apart = [o for o in others if not shared[o]]
        average = None if apart else grid.effect(column, level, shared)
        same = f"the same {apart[0].replace('_', ' ')} as {against}" if apart else ""
        note = say("not_measured_with", what=same) if apart else "; ".join(_left_out(grid, shared))
        yield told | {"kind": "average", "given": "", "note": note}, average, None
        for other in others:
            for given, choice in enumerate(grid.factors[other].names):
                row = told | {"kind": "given", "given": f"{other}={choice}"}
                if average is None or given not in shared[other]:
                    reason = note if apart else say("not_measured_with", what=row["given"])
                    yield row | {"note": reason}, None, None
                    continue
                rest = {o: kept for o, kept in shared.items() if o != other}
                row["note"] = "; ".join(_left_out(grid, rest))
                yield row, grid.effect(column, level, shared | {other: [given]}), average


def _left_out(grid: Grid, shared: Mapping[str, Sequence[int]]) -> Iterator[str]:
    for other, kept in shared.items():
        names = [n for i, n in enumerate(grid.factors[other].names) if i not in kept]
        if names:
            yield f"without {', '.join(f'{other}={name}' for name in names)}"


def _estimated(
    found: Sequence[Effect | None],
    averages: Sequence[Effect | None],
    fit: MixedFit,
    num_blocks: NDArray[np.int64],
) -> DataFrame:
    """Return effects, intervals and p-values in the order of the rows, NaN where there is none."""
    rows = [i for i, effect in enumerate(found) if effect is not None]
    effects_ = [effect for effect in found if effect is not None]
    table = DataFrame(index=range(len(found)))
    used = [effect.cells != 0 for effect in effects_]
    blocks = Series([int(num_blocks[u].min(initial=10**9)) for u in used], rows, dtype="Int64")
    enough = (blocks >= MIN_BLOCKS).reindex(table.index, fill_value=False)
    weights = [effect.weights for effect in effects_]
    table = table.join(_ratio(weights, rows, fit, enough, "effect", "effect", "p_value"))
    pairs = [
        (i, effect.less(average))
        for i, effect, average in zip(range(len(found)), found, averages, strict=True)
        if effect is not None and average is not None
    ]
    less = [weights for _, weights in pairs]
    names = ("ratio_to_average", "ratio", "ratio_p_value")
    table = table.join(_ratio(less, [i for i, _ in pairs], fit, enough, *names))
    return table.assign(
        num_cells=Series([int(u.sum()) for u in used], rows, dtype="Int64"), num_blocks=blocks
    )


def _ratio(
    weights: Sequence[tuple[Floats, Floats, Floats, float]],
    rows: list[int],
    fit: MixedFit,
    enough: Series,
    name: str,
    prefix: str,
    p_name: str,
) -> DataFrame:
    columns = [name, f"{prefix}_low", f"{prefix}_high", p_name]
    if not weights:
        return DataFrame(columns=columns, dtype=float)
    main, both, cells, unseen = (np.array(part) for part in zip(*weights, strict=True))
    middle, error, degrees = fit.predict(main, both, cells, unseen)
    half = np.where(enough[rows], half_width(error, degrees), np.nan)
    p_value = np.where(enough[rows], two_sided(middle, np.maximum(error, 1e-12), degrees), np.nan)
    values = (np.exp(middle), np.exp(middle - half), np.exp(middle + half), p_value)
    return DataFrame(dict(zip(columns, values, strict=True)), index=rows)


def _claimed(table: DataFrame) -> DataFrame:
    table = table.assign(
        p_holm=table.groupby("kind")["p_value"].transform(holm),
        ratio_p_holm=holm(table["ratio_p_value"]),
    )
    speed = {
        Claim.nothing: table["effect"].isna(),
        Claim.too_few_blocks: table["p_value"].isna(),
        Claim.no_difference_shown: ~(table["p_holm"] < LEVEL),
        Claim.blocks_lost: table["_flattered"],
        Claim.faster: table["effect"] > 1,
    }
    together = {
        "": table["ratio_p_value"].isna(),
        "no interaction shown": ~(table["ratio_p_holm"] < LEVEL),
        "more than on average": table["ratio_to_average"] > 1,
    }
    return table.assign(
        claim=chosen(speed, Claim.slower, table.index),
        interaction=chosen(together, "less than on average", table.index),
    )


# The effect of each technique alone, and of techniques added one after the other.

WATERFALL_COLUMNS = (
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
    steps = DataFrame(rows, columns=["_key", "kind", "position", "added", "previous"]).astype(
        {"_key": float}
    )
    gains = _gains(steps, known)
    return (
        steps.merge(table, on="_key")
        .merge(gains, on=["_key", "kind"])
        .reindex(columns=WATERFALL_COLUMNS)
    )


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
    per_block = log_throughput_per_block(known.valid, ROW)
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
    lost = lost_blocks(known.runs, ROW)
    table = DataFrame(rows, columns=columns, index=order, dtype=float).assign(
        _key=steps["_key"], cell_id=steps["_key"], kind=steps["kind"],
        baseline_cell_id=steps["previous"], num_blocks=lambda t: t["num_blocks"].fillna(0),
        _flattered=lambda t: flattered(t["speedup"] > 1, t["_key"], t["baseline_cell_id"], lost),
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
