"""One row per cell over all its runs, for every cell of a sweep, measured or not."""

from collections.abc import Hashable, Mapping
from dataclasses import replace

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.metrics import FLAGS, columns, known_metrics, metrics_with
from vitsweep.results.record import Status
from vitsweep.tables import names as col
from vitsweep.tables.blocks import ROW, log_ratios, log_throughput_per_block, median_polish
from vitsweep.tables.formatting import number
from vitsweep.tables.notes import START, starts
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import ITS_BASELINE, ITS_OWN, Families, compare_rows
from vitsweep.tables.stats import ROUNDING, Claim
from vitsweep.tables.valid_runs import KeyedRuns, checked_cells, checked_runs, keyed, peaks_gib

COMPARED = (
    "sweep", "device", "world_size", "images_per_step", "images_per_second", *columns("comparison"),
)  # fmt: skip
"""Columns that an empty table of cells has, for tables that are made from it."""

UNEVEN_CAUSE = "uneven_steps_cause"
WITH_INSTRUMENTS = ("attention_kernel", "sent_bytes_reason", "activation_gib_reason")
"""Columns of the environment that later runs of a cell may lack: the latest that is known counts."""


def cells(
    runs: DataFrame,
    baselines: Mapping[str, str | None],
    unrun: DataFrame | None = None,
    families: Families = (),
) -> DataFrame:
    """Return one row per cell, in the order in which the cells first appear.

    A cell that was measured in several sweeps or on several devices has a row for each. Of a cell
    that was measured again after its code changed, the runs of the newest code count.

    `images_per_second`, and with it everything proportional to it, is the one estimate that all
    tables use: the cell's level, from which effects of blocks are taken out by medians
    (`median_polish`). So a cell that was measured on a slow day is not compared with a baseline of a
    fast one, and a run that stalls moves no other cell. Of a screened cell it is its ratio times the level
    of its baseline. A cell that shares no block has the median over its runs, which
    `unadjusted_images_per_second` has for every cell. Where two levels contradict `speedup`,
    `speedup_note` says so.

    Other metrics are the median over the cell's counted runs (all of them where none was measured:
    the peak memory of a run that ran out of memory is a result); `peak_gib` is that of the memory which
    the device has; `throughput_spread` is the relative
    standard deviation of images/s over them; a validity flag is set where any of these runs had it,
    but `drifting` where most had it: warm-up shows in every run, a passing disturbance in one; spec
    and environment are those of the latest run, of those that were measured if any was. `blocks` counts
    the blocks measured, `num_pairs` the blocks shared with the baseline.

    Args:
        runs: one row per run.
        baselines: cell -> its baseline cell, or None.
        unrun: cells without a run (invalid, or not run yet), one row each: `cell_id, status, reason`
            and spec columns; a cell that has runs is taken from `runs`.
        families: the cells of each command, see `speedup_over`.

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    runs = checked_runs(runs)
    not_run = DataFrame() if unrun is None or unrun.empty else unrun
    if len(not_run) and len(runs):
        not_run = not_run[~not_run["cell_id"].isin(set(runs["cell_id"]))]
    if runs.empty:
        compared = () if len(not_run) else COMPARED
        return checked_cells(not_run, *compared).pipe(in_record_order).pipe(typed)
    absent = [m for m in known_metrics(runs) if m not in {*runs.columns, *columns("comparison")}]
    known = keyed(runs.reindex(columns=[*runs.columns, *absent]), baselines)
    apart = known.runs
    in_blocks = replace(known, runs=apart.assign(device=apart.get("device", "")))
    comparison = compare_rows(in_blocks, families).drop(columns="cell_id")
    medians = _medians(in_blocks)
    rows = (
        in_blocks.status.merge(_latest(apart), on=ROW)
        .merge(medians, on=ROW)
        .merge(comparison.rename(columns={"num_blocks": "num_pairs"}), on=ROW)
        .pipe(_with_levels, in_blocks, medians.set_index(ROW)["images_per_second"])
        .drop(columns=ROW)
    )
    rows = pd.concat([rows, not_run], ignore_index=True) if len(not_run) else rows
    rows.attrs = runs.attrs  # which grouping and merging lose
    return rows.assign(peak_gib=peaks_gib(rows)).pipe(in_record_order).pipe(typed)


ROUNDED, NEAR = 1.01, 1.05
"""Factors by which two levels may differ from their ratio: beyond its interval, as three digits round, and
beyond the ratio itself, however wide its interval is."""


def _with_levels(rows: DataFrame, known: KeyedRuns, medians: Series) -> DataFrame:
    """Replace throughput and what is proportional to it by levels; note where these contradict a ratio."""
    polished = median_polish(log_throughput_per_block(known.valid, ROW), ROW)
    levels = np.exp(polished.groupby(ROW)["level"].first()).reindex(medians.index).fillna(medians)
    base = rows[ROW].map(known.rows["baseline"]).map(levels)
    by_ratio = (rows["speedup"] * base).where(rows["claim"] == Claim.screened)
    level = by_ratio.fillna(rows[ROW].map(levels))
    measured = rows["images_per_second"].astype(float)
    factor = (level / measured).fillna(1.0)
    factor = factor.mask((factor - 1).abs() < ROUNDING, 1.0)
    rates = (c for c in metrics_with(follows="throughput") if c in rows)
    times = (c for c in metrics_with(follows="step_time") if c in rows)
    # a baseline of older code has no row of its own: the level beside the cell's is that of its newest code
    newest = known.numbers(known.rows.assign(cell_id=known.rows["baseline_cell_id"]))
    off = off_ratios(rows, level / rows[ROW].map(newest).map(levels))
    off_level = off_ratios(rows, level / base)
    pairs = log_ratios(polished, known.baselines, ROW) if len(off) else DataFrame()
    row = rows[ROW].to_dict()
    told = {
        n: f"{note}: {_farthest(pairs[pairs[ROW] == row[n]])}" if n in off_level else note
        for n, note in off.items()
    }
    return rows.assign(
        **{c: rows[c].astype(float) * factor for c in rates},
        **{c: rows[c].astype(float) / factor for c in times},
        unadjusted_images_per_second=measured,
        speedup_note=with_notes(rows["speedup_note"], told),
    )


def off_ratios(table: DataFrame, quotient: Series) -> dict[Hashable, str]:
    """Return what is said of the rows of which the quotient of two levels contradicts the ratio.

    Args:
        table: `speedup, speedup_low, speedup_high`.
        quotient: level of each row over that of its baseline.
    """
    low, high = table["speedup_low"] / ROUNDED, table["speedup_high"] * ROUNDED
    apart = (quotient < table["speedup"] / NEAR) | (quotient > table["speedup"] * NEAR)
    off = quotient[apart | (quotient < low) | (quotient > high)]
    return {place: say("off_ratio", quotient=number(value)) for place, value in off.items()}


def with_notes(notes: Series, further: Mapping[Hashable, str]) -> list[str]:
    """Return the notes of a table with another one at the end of some."""
    return ["; ".join(filter(None, (note, further.get(n)))) for n, note in notes.items()]


def _farthest(pairs: DataFrame) -> str:
    """Say which run is farthest from its level, of the pairs of a cell and its baseline, oldest first."""
    rests = pairs[["rest_x", "rest_y"]].to_numpy()
    place, side = np.unravel_index(np.abs(rests).argmax(), rests.shape)
    share = number(np.exp(rests[place, side]), 2)
    whose = (ITS_OWN, ITS_BASELINE)[side]
    return say("off_level", whose=whose, share=share, block=place + 1, blocks=len(rests))


def typed(table: DataFrame) -> DataFrame:
    """Convert counts and flags to nullable types and metrics to floats."""
    whole = {c: "Int64" for c in ("attempt", "failed_rank", "blocks", "num_pairs", "family_size")}
    flags = {c: "boolean" for c in FLAGS}
    floats = {c: "float64" for c in col.metric_columns(table)}
    types, known = whole | flags | floats, dict(table.dtypes.items())
    other = {c: t for c, t in types.items() if c in known and known[c] != t}
    return table.astype(other).copy()  # one block


def in_record_order(table: DataFrame) -> DataFrame:
    """Order the columns: head, spec, metrics with the comparison, validity, environment."""
    metrics, every = col.metric_columns(table), list(known_metrics(table))
    before = [m for m in metrics if every.index(m) < every.index("speedup")]
    compared = columns("comparison")
    order = [
        *(c for c in columns("head") if c in table),
        *col.spec_columns(table),
        *before,
        *(c for c in compared if c in table),
        *(m for m in metrics if m not in before and m not in compared),
        *(str(c) for c in table if str(c).startswith("predicted_")),
        *(c for c in columns("validity") if c in table),
    ]
    return table[[*order, *(c for c in col.environment_columns(table) if c not in order)]]


def _latest(runs: DataFrame) -> DataFrame:
    measured = set(runs.columns) & {*known_metrics(runs), *FLAGS, UNEVEN_CAUSE}
    outcome = {"status", "reason", "failed_rank", "attempt"}
    known = [c for c in WITH_INSTRUMENTS if c in runs]
    runs = runs.assign(**runs.groupby(ROW, sort=False, observed=True)[known].ffill())
    measured_last = runs["status"].eq(Status.measured).sort_values(kind="stable").index
    last = runs.loc[measured_last].groupby(ROW, sort=False, observed=True).tail(1)
    # the median of memory is over the runs of all starts
    if START in runs and runs[START].nunique(dropna=False) > 1:
        found = starts(runs, ROW)
        each = [found.get(row, own) for row, own in zip(last[ROW], last[START], strict=True)]
        last = last.assign(**{START: each})
    return last.drop(
        columns=[*measured, *outcome & set(runs.columns), *columns("run")], errors="ignore"
    )


def _medians(known: KeyedRuns) -> DataFrame:
    runs, good = known.runs, known.valid
    used = pd.concat([good, runs[~runs[ROW].isin(set(good[ROW]))]])
    metrics = col.metric_columns(used)
    other = [m for m in metrics if used[m].dtype != "float64"]
    numbers = used.assign(**{m: pd.to_numeric(used[m], errors="coerce") for m in other})
    times = [t for t in metrics_with(follows="step_time") if t in metrics]
    numbers[times] = 1 / numbers[times].where(numbers[times] > 0)
    groups = numbers.groupby(ROW, sort=False, observed=True)
    throughput = groups["images_per_second"]
    medians = groups[metrics].median()
    # the median of rates, turned around: that of an even number of times is not its reciprocal
    medians[times] = 1 / medians[times]
    compiling = runs[runs["compile_seconds"].notna()].groupby(ROW)["compile_seconds"]
    later = runs[compiling.cumcount().reindex(runs.index).gt(0)].groupby(ROW)["compile_seconds"]
    medians["first_compile_seconds"] = compiling.first()
    medians["compile_seconds"] = later.median().reindex(medians.index).fillna(compiling.first())
    has_rate = good["images_per_second"].notna()
    # of a cell of which no run has a throughput all blocks count
    with_rate = good[has_rate | ~has_rate.groupby(good[ROW]).transform("any")]
    return (
        medians.join(_flags(used))
        .join(with_rate.groupby(ROW)["block"].nunique().rename("blocks"))
        .assign(blocks=lambda t: t["blocks"].fillna(0).astype(int))
        .assign(throughput_spread=throughput.std() / throughput.mean())
        .reset_index()
    )


def _flags(used: DataFrame) -> DataFrame:
    flags = [f for f in FLAGS if f in used]
    shares = used[flags].eq(True).groupby(used[ROW]).mean()
    found = shares.gt(Series({f: FLAGS[f].least_share for f in flags}))
    if UNEVEN_CAUSE in used:
        causes = used.groupby(ROW)[UNEVEN_CAUSE].last()  # that is known
        found[UNEVEN_CAUSE] = causes.where(found["uneven_steps"])
    return found
