"""One row per cell over all its runs, for every cell of a sweep, measured or not."""

from collections.abc import Mapping

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.metrics import FLAGS, METRICS
from vitsweep.tables import columns as col
from vitsweep.tables.speedup import speedup_over
from vitsweep.tables.status import counted, final_status, in_order


def cells(
    runs: DataFrame, baselines: Mapping[str, str | None], unrun: DataFrame | None = None
) -> DataFrame:
    """Return one row per cell, in the order in which the cells first appear.

    Metrics are the median over the cell's counted runs (all of them where none was measured: the
    peak of a run that ran out of memory is a result); `throughput_spread` is the relative standard
    deviation of images/s over them; a validity flag is set where any of these runs had it, but
    `drifting` where most had it: warm-up shows in every run, a passing disturbance in one; spec and
    environment are those of the latest run. `blocks` counts the blocks measured, `num_pairs`
    the blocks shared with the baseline.

    Args:
        runs: one row per run.
        baselines: cell -> its baseline cell, or None.
        unrun: cells without a run (invalid, or not run yet), one row each: `cell_id, status, reason` and
            spec columns; a cell that has runs is taken from `runs`.
    """
    not_run = _without_runs(unrun, runs)
    if runs.empty:
        return not_run.pipe(in_record_order).pipe(typed)
    runs = with_all_metrics(runs)
    comparison = speedup_over(runs, baselines).rename(columns={"num_blocks": "num_pairs"})
    rows = (
        final_status(runs)
        .merge(_latest(runs), on="cell_id")
        .merge(_medians(runs), on="cell_id")
        .merge(comparison, on="cell_id", how="left")
    )
    rows = pd.concat([rows, not_run], ignore_index=True) if len(not_run) else rows
    return rows.pipe(in_record_order).pipe(typed)


def with_all_metrics(runs: DataFrame) -> DataFrame:
    """Add the metric columns that no run has, empty."""
    measured = [m for m in METRICS if m not in runs and not m.startswith("speedup")]
    return runs.reindex(columns=[*runs.columns, *measured])


def typed(table: DataFrame) -> DataFrame:
    """Convert counts and flags to nullable types and metrics to floats."""
    whole = {c: "Int64" for c in ("attempt", "failed_rank", "blocks", "num_pairs")}
    flags = {c: "boolean" for c in FLAGS}
    floats = {c: "float64" for c in col.metric_columns(table)}
    types = whole | flags | floats
    return table.astype({c: t for c, t in types.items() if c in table}).copy()  # one block


def in_record_order(table: DataFrame) -> DataFrame:
    """Order the columns: head, spec, metrics with the comparison, validity, environment."""
    metrics = col.metric_columns(table)
    before = [m for m in metrics if list(METRICS).index(m) < list(METRICS).index("speedup")]
    order = [
        *(c for c in col.HEAD if c in table),
        *col.spec_columns(table),
        *before,
        *(c for c in col.COMPARISON if c in table),
        *(m for m in metrics if m not in before and m not in col.COMPARISON),
        *col.predicted_columns(table),
        *(c for c in col.VALIDITY if c in table),
    ]
    return table[[*order, *(c for c in col.environment_columns(table) if c not in order)]]


def _without_runs(unrun: DataFrame | None, runs: DataFrame) -> DataFrame:
    if unrun is None or unrun.empty:
        return DataFrame()
    return unrun if runs.empty else unrun[~unrun["cell_id"].isin(set(runs["cell_id"]))]


def _latest(runs: DataFrame) -> DataFrame:
    measured = set(runs.columns) & (set(METRICS) | set(FLAGS))
    outcome = {"status", "reason", "failed_rank", "attempt"}
    return (
        in_order(runs)
        .groupby("cell_id", sort=False, observed=True)
        .tail(1)
        .drop(columns=[*measured, *outcome & set(runs.columns), *col.RUN_ONLY], errors="ignore")
    )


def _medians(runs: DataFrame) -> DataFrame:
    good = counted(runs)
    used = pd.concat([good, runs[~runs["cell_id"].isin(set(good["cell_id"]))]])
    metrics = col.metric_columns(used)
    numbers = used.assign(**{m: pd.to_numeric(used[m], errors="coerce") for m in metrics})
    groups = numbers.groupby("cell_id", sort=False, observed=True)
    throughput = groups["images_per_second"]
    return (
        groups[metrics]
        .median()
        .join(_flags(used))
        .join(good.groupby("cell_id", observed=True)["block"].nunique().rename("blocks"))
        .assign(blocks=lambda t: t["blocks"].fillna(0).astype(int))
        .assign(throughput_spread=throughput.std() / throughput.mean())
        .reset_index()
    )


def _flags(used: DataFrame) -> DataFrame:
    flags = [f for f in FLAGS if f in used]
    shares = used[flags].eq(True).groupby(used["cell_id"]).mean()
    return shares.gt(Series({f: 0.5 if f == "drifting" else 0.0 for f in flags}))
