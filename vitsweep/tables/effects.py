"""What each technique brings on average over the other choices, and together with each of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.blocks import (
    ROW,
    WithinBlocks,
    log_ratios,
    log_throughput_per_block,
    within_blocks,
)
from vitsweep.tables.cells import cells
from vitsweep.tables.formatting import plain
from vitsweep.tables.names import Changes, named, names_by_id, varying_columns, with_changes
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import (
    biased,
    is_biased,
    may_be_drift,
    missing_blocks_of,
    timed_apart,
    windows_of,
)
from vitsweep.tables.stats import (
    LEVEL,
    MIN_BLOCKS,
    Claim,
    any_look_half_width,
    any_look_p_value,
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
    valid_runs,
)

Floats = NDArray[np.float64]

COLUMNS = (
    "device kind technique against given effect effect_low effect_high p_value p_holm claim "
    "ratio_to_average ratio_low ratio_high ratio_p_value ratio_p_holm interaction "
    "num_cells num_blocks note timed"
).split()
BASELINE = "baseline"
"""Factor that distinguishes cells with different baselines: other sizes, models, data."""


def effects(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Estimate what every technique brings over a grid of choices, on average and with each choice.

    Least squares of log(images/s) = cell + block, within blocks. An effect is exp of the mean of
    cell(technique) - cell(reference) over the combinations of the other choices in which both were measured;
    the reference is the baselines' choice. Its 95 % interval is Student's t over the effect's contrast in
    each block (`WithinBlocks.variance_over_blocks`), or the one that is valid at any look where a command
    looked at its intervals while it measured.

    Args:
        runs: one row per run, in the columns of the store.
        baselines: cell -> its baseline, None where it has none.

    Returns:
        One row per effect and kind of device. `kind` is `average` (over the other choices) or
        `given` (with the one choice `given`, over the rest); `technique` and `against` are
        `column=choice`; `effect` is a ratio of throughput (1.31: 31 % more images per second);
        `claim` is `faster`, `slower`, `missing blocks` (see `speedup_over`), `no difference shown`, `too few
        blocks`, or empty where there is no estimate. For `given`, `ratio_to_average` is this effect over
        the average one and `interaction` says `more than on average`, `less than on average` or `no
        interaction shown`.
        p-values are adjusted within each kind (Holm 1979). It compares `num_cells`, `num_blocks` is the
        fewest blocks of one of them; `note` says why there is no estimate, or what the average leaves out,
        `timed` for how long two cells were timed that it compares, where that differs (`timed_apart`):
        then nothing is claimed of an interval that reaches within `LARGEST_DRIFT` of 1.

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    runs = checked_runs(runs)
    # runs that do not say belong together
    by_device = runs.groupby(text(runs, "device"), sort=False)
    tables = [_of_device(some, baselines).assign(device=str(name)) for name, some in by_device]
    filled = [table for table in tables if len(table)]
    found = pd.concat(filled, ignore_index=True) if filled else DataFrame()
    return found.reindex(columns=COLUMNS)


def _of_device(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    data = within_blocks(runs)
    latest = runs.drop_duplicates("cell_id", keep="last").set_index("cell_id", drop=False)
    grid, usual = _grid(latest.loc[data.cells].reset_index(drop=True), baselines)
    columns = [str(c) for c in grid if c != BASELINE]
    if not columns or not len(data.spectrum[0]):  # no two cells, or none shared a block
        return DataFrame(columns=COLUMNS)
    seconds = Series(data.cells, grid.index).map(windows_of(valid_runs(runs), "cell_id"))
    told, found, averages = zip(
        *(row for c in columns for row in _rows(c, grid, usual, seconds)), strict=True
    )
    used = [weights != 0 for weights in found]
    fewest = [data.num_blocks[cells].min() if cells.any() else pd.NA for cells in used]
    table = DataFrame(told).assign(
        num_cells=Series([int(cells.sum()) or pd.NA for cells in used], dtype="Int64"),
        num_blocks=Series(fewest, dtype="Int64"),
    )
    whole, less = np.array(found), np.array(found) - np.array(averages)
    table = table.join(_ratio(whole, data, table, "effect", "effect", "p_value"))
    table = table.join(_ratio(less, data, table, "ratio_to_average", "ratio", "ratio_p_value"))
    lost, names = missing_blocks_of(newest_code(runs)), np.array(data.cells)
    sides = [
        is_biased(lost, names[w * sign > 0], names[w * sign < 0])
        for w, sign in zip(found, np.where(table["effect"] > 1, 1, -1), strict=True)
    ]
    return _claimed(table.assign(_survivors=sides)).drop(columns="_survivors")


def _grid(
    cells: DataFrame, baselines: Mapping[str, str | None]
) -> tuple[DataFrame, dict[str, str]]:
    """Return the choices that vary among the cells of one baseline, and those of the baselines."""
    stratum = cells["cell_id"].map(lambda c: baselines.get(c) or "").astype(str)
    is_baseline = stratum == cells["cell_id"]
    grid, usual = DataFrame(index=cells.index), {}
    for column in varying_columns(cells) if len(cells) else ():
        texts = cells[column].map(plain).astype(str)
        if (texts.groupby(stratum).nunique() > 1).any():
            grid[column] = texts
            of_baselines = texts[is_baseline] if is_baseline.any() else texts
            usual[column] = str(of_baselines.value_counts().index[0])
    if len(grid.columns) and stratum.nunique() > 1:
        names = names_by_id(cells[is_baseline])  # named by what distinguishes the baselines
        grid[BASELINE] = stratum.map(lambda cell: str(names.get(cell, cell)))
    return grid, usual


Row = tuple[dict[str, Any], Floats, Floats]


def _rows(column: str, grid: DataFrame, usual: Mapping[str, str], windows: Series) -> Iterator[Row]:
    """Yield what a row says, the weights of its effect on the cells, and those of the effect on average.

    Weights are 0 where the cells cannot tell it, and those of the average NaN in its own row.
    """
    others = [str(c) for c in grid if c != column]
    none = np.full(len(grid), np.nan)
    for choice in grid[column].unique():
        if choice == usual[column]:
            continue
        against = f"{column}={usual[column]}"
        told = {"technique": f"{column}={choice}", "against": against}
        sides = [grid[column] == choice, grid[column] == usual[column]]
        keys = Series(
            list(zip(*(grid[c] for c in others), strict=True)) if others else "", grid.index
        )
        common = sides[0] | sides[1]
        common &= keys.isin(set(keys[sides[0]]) & set(keys[sides[1]]))
        average, note = _weights(sides, common, keys), "; ".join(_left_out(grid, others, common))
        if not common.any():
            apart = [o for o in others if not {*grid[o][sides[0]]} & {*grid[o][sides[1]]}]
            same = apart[0].replace("_", " ") if apart else "other choices"
            note = say("not_measured_with", what=f"the same {same} as {against}")
        row = {"kind": "average", "given": "", "note": note}
        yield told | row | _timed(sides, common, keys, windows), average, none
        for other in others:
            rest = [o for o in others if o != other]
            for given in grid[other].unique():
                here = common & (grid[other] == given)
                row = told | {"kind": "given", "given": f"{other}={given}"}
                mean = average
                without = "; ".join(_left_out(grid, rest, here))
                if not here.any():
                    mean = none
                    without = say("not_measured_with", what=row["given"]) if common.any() else note
                row |= {"note": without} | _timed(sides, here, keys, windows)
                yield row, _weights(sides, here, keys), mean


def _weights(sides: Sequence[Series], used: Series, keys: Series) -> Floats:
    """Return the weight of each cell: the mean over combinations of one side minus the other."""
    weights = np.zeros(len(used))
    for side, sign in zip(sides, (1, -1), strict=True):
        rows = np.flatnonzero(side & used)
        times = keys.iloc[rows].map(keys.iloc[rows].value_counts())
        weights[rows] = sign / times / times.rdiv(1).sum()
    return weights


def _timed(sides: Sequence[Series], used: Series, keys: Series, windows: Series) -> dict[str, str]:
    """Say for how long the first two cells were timed that are compared and were timed separately."""
    own, base = (dict(zip(keys[s & used], windows[s & used], strict=True)) for s in sides)
    apart = (timed_apart(own[key], base[key], "without it") for key in own)
    return {"timed": next(filter(None, apart), "")}


def _left_out(grid: DataFrame, others: Sequence[str], used: Series) -> Iterator[str]:
    for other in others:
        kept = set(grid[other][used])
        names = [f"{other}={name}" for name in grid[other].unique() if name not in kept]
        if names:
            yield f"without {', '.join(names)}"


def _ratio(
    weights: Floats, data: WithinBlocks, table: DataFrame, name: str, prefix: str, p_name: str
) -> DataFrame:
    """Return ratios, intervals and p-values of weighted sums of the cells' logs, NaN where there is none.

    Args:
        weights: sums x cells.
        data: the cells' logs.
        table: `num_blocks` of each sum.
        name: column of the ratio.
        prefix: of the columns with the ends of its interval.
        p_name: column of the p-value.
    """
    values, vectors = data.spectrum
    known = np.abs(weights).sum(axis=1) > 0  # and blocks connect what it compares
    turned = np.nan_to_num(weights) @ vectors
    known &= np.abs(turned @ vectors.T - weights).max(axis=1) < 1e-6
    variance, degrees = data.variance_over_blocks(turned / values @ vectors.T)
    middle = np.where(known, weights @ data.logs, np.nan)
    error = np.maximum(np.sqrt(variance), 1e-12)
    number = degrees + 1
    if data.any_look:
        spread = error * np.sqrt(number)
        half, p_value = (
            any_look_half_width(spread, number),
            any_look_p_value(middle, spread, number),
        )
    else:
        half, p_value = half_width(error, degrees), two_sided(middle, error, degrees)
    enough = known & (table["num_blocks"].fillna(0) >= MIN_BLOCKS).to_numpy(bool)
    half, p_value = (np.where(enough, v, np.nan) for v in (half, p_value))
    ends = np.exp(middle), np.exp(middle - half), np.exp(middle + half), p_value
    columns = (name, f"{prefix}_low", f"{prefix}_high", p_name)
    return DataFrame(dict(zip(columns, ends, strict=True)))


def _claimed(table: DataFrame) -> DataFrame:
    table = table.assign(
        p_holm=table.groupby("kind")["p_value"].transform(holm),
        ratio_p_holm=holm(table["ratio_p_value"]),
    )
    apart = table.groupby("technique")["timed"].transform("max")  # the average has all of its cells
    speed = {
        Claim.nothing: table["effect"].isna(),
        Claim.too_few_blocks: table["p_value"].isna(),
        Claim.no_difference_shown: ~(table["p_holm"] < LEVEL)
        | may_be_drift(table, "effect_low", "effect_high"),
        Claim.missing_blocks: table["_survivors"],
        Claim.faster: table["effect"] > 1,
    }
    together = {
        "": table["ratio_p_value"].isna(),
        "no interaction shown": ~(table["ratio_p_holm"] < LEVEL)
        | may_be_drift(table.assign(timed=apart), "ratio_low", "ratio_high"),
        "more than on average": table["ratio_to_average"] > 1,
    }
    return table.assign(
        claim=chosen(speed, Claim.slower, table.index),
        interaction=chosen(together, "less than on average", table.index),
    )


# The effect of each technique alone, and of techniques added one after the other.

WATERFALL_COLUMNS = (
    "baseline_cell_id kind position added cell_id status images_per_second throughput_spread "
    "speedup speedup_low speedup_high claim num_pairs gain gain_low gain_high gain_claim timed "
    "sweep device"
).split()
NAMES = {"speedup": "gain", "speedup_low": "gain_low", "speedup_high": "gain_high"}


def waterfall(
    runs: DataFrame,
    baselines: Mapping[str, str | None],
    cells_: DataFrame | None = None,
) -> DataFrame:
    """Return the techniques one at a time and the longest cumulative sequence, per baseline.

    `kind` is `alone` (one change against the baseline) or `cumulative` (each row keeps the changes
    of the row above and adds `added`; position 0 is the baseline). `speedup` is over the baseline,
    `gain` over the row above, each with its own interval and claim: paired where both shared
    blocks, else by way of the baseline (see `contrast`). The speedups of a cumulative sequence all
    divide by one baseline: they are not factors to multiply. A technique that was not measured
    keeps its row with its `status`. `timed` says for how long a row and the one that `gain` divides by
    were timed, where that differs (`timed_apart`), and limits `gain_claim` as in `effects`.

    Args:
        runs: one row per run.
        baselines: cell -> its baseline cell, or None; of steps in several orders, its first cells come first.
        cells_: one row per cell of these runs, where it is there already.

    Raises:
        VitsweepError: cells of one baseline ran on different devices.
    """
    checked = checked_runs(runs, "device")
    known = keyed(checked, baselines)
    every = cells(checked, baselines) if cells_ is None else cells_
    table = _keyed_cells(one_device_each(every), known)
    planned = {cell: place for place, cell in enumerate(baselines)}
    table = table.sort_values("cell_id", key=lambda ids: ids.map(planned), kind="stable")
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

    A cell whose baseline has older code, or no run, stands next to the newest row of the baseline.
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
    for current in sorted(dict.fromkeys(sets), key=len):
        below = [best[s] for s in best if s < current]
        best[current] = [*max(below, key=len, default=[]), current]
    return max(best.values(), key=len, default=[])


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
    lost = missing_blocks_of(known.runs, ROW)
    table = DataFrame(rows, columns=columns, index=order, dtype=float).assign(
        _key=steps["_key"], cell_id=steps["_key"], kind=steps["kind"],
        baseline_cell_id=steps["previous"], num_blocks=lambda t: t["num_blocks"].fillna(0),
        _survivors=lambda t: biased(t["speedup"] > 1, t["_key"], t["baseline_cell_id"], lost),
    )  # fmt: skip
    windows = windows_of(known.valid, ROW)
    sides = (table[c].map(windows) for c in ("_key", "baseline_cell_id"))
    pairs = zip(*sides, strict=True)
    timed = [timed_apart(own, other, "the one before") for own, other in pairs]
    adjusted = table.groupby("kind")["p_value"].transform(holm) if len(table) else table["p_value"]
    table = table.assign(p_holm=adjusted, timed=timed)
    is_drift = may_be_drift(table, "speedup_low", "speedup_high")
    gain_claim = claims(table).mask(is_drift, str(Claim.no_difference_shown))
    gains = table.assign(gain_claim=gain_claim).rename(columns=NAMES)
    return gains[["_key", "kind", *NAMES.values(), "gain_claim", "timed"]]


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
