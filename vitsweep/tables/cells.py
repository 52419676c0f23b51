"""One row per cell over all its runs, for every cell of a sweep, measured or not."""

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.metrics import FLAGS, columns, known_metrics, metrics_with
from vitsweep.results.record import Status
from vitsweep.tables import names as col
from vitsweep.tables.blocks import ROW
from vitsweep.tables.speedup import Families, compare_rows
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
    tables use: the cell's speedup, paired within blocks, times the throughput of its baseline over
    all blocks. So a cell that was measured on a slow day is not compared with a baseline of a fast
    one, and no table contradicts `speedup`. Without a speedup, and for the baseline, it is the
    median over the runs, which `unadjusted_images_per_second` has for every cell.

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
        .pipe(_block_adjusted, known, medians.set_index(ROW)["images_per_second"])
        .drop(columns=ROW)
    )
    rows = pd.concat([rows, not_run], ignore_index=True) if len(not_run) else rows
    rows.attrs = runs.attrs  # which grouping and merging lose
    return rows.assign(peak_gib=peaks_gib(rows)).pipe(in_record_order).pipe(typed)


def _block_adjusted(rows: DataFrame, known: KeyedRuns, median: Series) -> DataFrame:
    """Replace throughput, and what is proportional to it, by speedup x throughput of the baseline."""
    measured = rows["images_per_second"].astype(float)
    base = rows[ROW].map(known.rows["baseline"]).map(median).astype(float)
    factor = (rows["speedup"] * base / measured).fillna(1.0)
    rates = (c for c in metrics_with(follows="throughput") if c in rows)
    times = (c for c in metrics_with(follows="step_time") if c in rows)
    return rows.assign(
        **{c: rows[c].astype(float) * factor for c in rates},
        **{c: rows[c].astype(float) / factor for c in times},
        unadjusted_images_per_second=measured,
    )


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
