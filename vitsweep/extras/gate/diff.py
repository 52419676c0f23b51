"""The same cells measured twice, on two days, machines or states of the code: what changed."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
from pandas import DataFrame, MultiIndex, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import Metric, headings, known_metrics
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, Status
from vitsweep.tables.blocks import log_ratios, log_throughput_per_block
from vitsweep.tables.names import cell_names
from vitsweep.tables.stats import (
    MIN_BLOCKS,
    POWER,
    Claim,
    adjusted,
    chosen,
    half_width,
    moments,
    two_sided,
)
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_runs, final_status, numbers, valid_runs

WORSE, GONE = "worse beyond tolerance", "no longer measured"
FELL = "accuracy fell"
PARTLY = "missing blocks"
TOO_FEW = "too few runs"
NO_STEP = "no number now"
NEW, ABSENT, NEVER = "new", "not run now", "not measured before"
NO_NUMBERS = "no numbers"
BASELINE_SLOWER = "baseline slower"
UNDECIDED, WITHIN, BETTER = "undecided", "worse within tolerance", "better"
THROUGHPUT = "images_per_second"
ACCURACY, ACCURACY_TOLERANCE = "accuracy_top1", 0.01
"""Accuracy is compared wherever the kept side has it; it may not fall by more than this fraction."""
FAR = 0.05
"""Without an interval, accuracy has fallen where it is lower than accepted by more than this."""


def diff(
    now: DataFrame,
    kept: DataFrame,
    baselines: Mapping[str, str | None],
    metrics: Sequence[str] = ("speedup",),
    tolerance: float = 0.0,
    *,
    mixed_hardware: bool = False,
) -> DataFrame:
    """Compare every cell with its kept runs, of another day, machine or code.

    One observation is a run; for `speedup` it is a block, whose ratio over the cell's baseline does
    not contain what differs between the days as a whole. What has no speedup, as a baseline, is compared by
    images per second. The interval of now / kept is Welch's over logs, at the level of Holm's method over all
    rows: of the hypotheses that a ratio lies within the tolerance in either direction. With no true change at
    most one comparison of sweeps in twenty shows one.

    Args:
        now: one row per run, in the columns of the store.
        kept: the same of the kept side.
        baselines: cell -> its baseline cell.
        metrics: columns of `METRICS`, or headings of the printed table.
        tolerance: how much worse is accepted, as a fraction.
        mixed_hardware: leave out how baselines moved, which is the machine's.

    Returns:
        One row per cell of either side and metric: `cell_id, name, metric, of_baseline, is_baseline`;
        statuses, reasons and missing blocks of both sides (`_kept`, `_now`); `better, limit, verdict`;
        `ratio, ratio_low, ratio_high` (empty with fewer than 3 values in either); `count_kept,
        count_now`; `detectable`, the factor beyond any limit that is shown to lie beyond it with 80 %
        probability.

    Raises:
        VitsweepError: a column is missing or does not hold what its name says, or a metric is none.
    """
    now, kept = (checked_runs(side, "reason") for side in (now, kept))
    columns = list(dict.fromkeys(metric_named(name, now) for name in metrics))
    if ACCURACY in kept and kept[ACCURACY].notna().any():
        columns += [ACCURACY] * (ACCURACY not in columns)
        now = now if ACCURACY in now else now.assign(**{ACCURACY: float("nan")})
    known = known_metrics(now)
    asked = _asked(_cells(now, kept), columns, baselines, {*now["cell_id"]} & {*kept["cell_id"]})
    if mixed_hardware:
        asked = asked[~asked["of_baseline"]].assign(is_baseline=False)
    asked = asked.assign(
        better=asked["metric"].map(lambda metric: known[metric].better),
        limit=[_limit(known[metric], tolerance) for metric in asked["metric"]],
    )
    return (
        asked.merge(_changes(now, kept, asked, baselines), on=["cell_id", "metric"], how="left")
        .pipe(_once_where_unmeasured, several=len(columns) > 1)
        .assign(verdict=verdicts)
    )


def _asked(
    cells: DataFrame,
    columns: Sequence[str],
    baselines: Mapping[str, str | None],
    both: Collection[str],
) -> DataFrame:
    """Return a row `of_baseline, is_baseline, metric` more for each cell and metric.

    What has no speedup is compared by images per second: a baseline, and a cell without one on both sides.
    `is_baseline` holds where images per second are of a baseline and speedups are asked for, `of_baseline`
    where nobody asked for images per second.
    """
    rows = cells.merge(DataFrame({"metric": columns}), how="cross")
    base = rows["cell_id"].map(lambda cell: baselines.get(cell)).astype(object)
    is_own, is_ratio = base == rows["cell_id"], rows["metric"] == "speedup"
    alone = is_ratio & (is_own | ~base.isin(list(both)))
    rows = rows.assign(of_baseline=alone & is_own & (THROUGHPUT not in columns))
    rows = rows.assign(metric=rows["metric"].mask(alone, THROUGHPUT))
    is_baseline = is_own & (rows["metric"] == THROUGHPUT) & ("speedup" in columns)
    return rows.assign(is_baseline=is_baseline).drop_duplicates(["cell_id", "metric"])


def metric_named(name: str, runs: DataFrame) -> str:
    """Return the column of a metric that can become better or worse.

    Args:
        name: column, or heading of the printed table.
        runs: which may have metrics of the user's.

    Raises:
        VitsweepError: there is no such metric, or neither direction is an improvement.
    """
    by_heading = headings(runs)
    column = by_heading.get(name, name)
    comparable = [c for c, m in known_metrics(runs).items() if m.better and m.gated]
    if column not in comparable:
        shown = [h for h, c in by_heading.items() if c in comparable and h != c]
        raise VitsweepError(
            f"`{name}` is not a metric that can become better or worse; choose from "
            f"{', '.join((*shown, *comparable))}."
        )
    return column


def _cells(runs: DataFrame, kept: DataFrame) -> DataFrame:
    """Return one row per cell of either side: `cell_id, name`, status and reason of both."""
    sides = [
        final_status(side)[["cell_id", "status", "reason"]]
        .rename(columns={"status": f"status_{name}", "reason": f"reason_{name}"})
        for side, name in ((kept, "kept"), (runs, "now"))
    ]  # fmt: skip
    every = pd.concat([runs, kept]).drop_duplicates("cell_id", keep="first").reset_index(drop=True)
    names = DataFrame({"cell_id": every["cell_id"], "name": cell_names(every)})
    lost = [_missing(side).add_suffix(f"_{n}") for side, n in ((kept, "kept"), (runs, "now"))]
    return (
        sides[0]
        .merge(sides[1], on="cell_id", how="outer")
        .merge(names, on="cell_id")
        .join(lost[0], on="cell_id")
        .join(lost[1], on="cell_id")
        .fillna({c: 0 for c in ("lost_kept", "lost_now", "lost_share_kept", "lost_share_now")})
    )


def _missing(runs: DataFrame) -> DataFrame:
    """Return by cell how many blocks hold no measured run, and which share of its blocks that is.

    Runs that were killed or preempted say nothing about their cell and do not count.
    """
    own = runs[~runs["status"].isin([str(s) for s in STOPPED_FROM_OUTSIDE])]
    good = (own["status"] == Status.measured).groupby([own["cell_id"], own["block"]]).any()
    lost = (~good).groupby(level=0)
    return DataFrame({"lost": lost.sum(), "lost_share": lost.mean()})


def _once_where_unmeasured(table: DataFrame, several: bool) -> DataFrame:
    """Keep one row of a cell that one side lacks, and no accuracy that was never kept."""
    measured = (table["status_kept"] == Status.measured) & (table["status_now"] == Status.measured)
    again = table["cell_id"].duplicated() & ~measured
    never = measured & (table["metric"] == ACCURACY) & ~(table["count_kept"] > 0)
    return table[~again & ~(never & several)].reset_index(drop=True)


def _limit(metric: Metric, tolerance: float) -> float:
    if metric.column == ACCURACY:
        return 1 - min(tolerance, ACCURACY_TOLERANCE)
    return 1 - tolerance if metric.better == "higher" else 1 + tolerance


def verdicts(table: DataFrame) -> Series:
    """Return the message on each row, by its statuses, ratio with its interval, limit and missing blocks."""
    was = table["status_kept"] == Status.measured
    low, high = table["ratio_low"], table["ratio_high"]
    up = table["better"] == "higher"
    limit, accuracy = table["limit"], table["metric"] == ACCURACY
    beyond = (high < limit).where(up, low > limit)
    worse, within = (high < 1).where(up, low > 1), (low >= limit).where(up, high <= limit)
    gone = (table["count_kept"] > 0) & ~(table["count_now"] > 0)
    rules = {
        NEW: table["status_kept"].isna(),
        ABSENT: table["status_now"].isna(),
        GONE: was & (table["status_now"] != Status.measured),
        NEVER: ~was,
        FELL: accuracy & (gone | (high < limit) | (high.isna() & (table["ratio"] < limit - FAR))),
        BASELINE_SLOWER: beyond & table["of_baseline"],
        WORSE: ~accuracy & beyond,
        PARTLY: table["lost_share_now"] > table["lost_share_kept"],
        NO_STEP: gone,
        NO_NUMBERS: table["ratio"].isna(),
        TOO_FEW: high.isna() & (~accuracy | (table["ratio"] < limit)),
        Claim.no_difference_shown: high.isna(),
        WITHIN: worse & (within | accuracy),
        UNDECIDED: worse,
        BETTER: (low > 1).where(up, high < 1),
    }
    return chosen(rules, Claim.no_difference_shown, table.index)


def _changes(
    now: DataFrame, kept: DataFrame, asked: DataFrame, baselines: Mapping[str, str | None]
) -> DataFrame:
    """Return ratio, interval and numbers of values of the rows that are asked for and have any."""
    sides = [
        pd.concat(
            {m: _moments(good, m, baselines) for m in asked["metric"].unique()}, names=["metric"]
        )
        for side in (kept, now)
        for good in (valid_runs(side) if len(side) else side,)
    ]
    every = sides[0].index.union(sides[1].index, sort=False)
    every = every[every.isin(MultiIndex.from_frame(asked[["metric", "cell_id"]]))]
    before, after = (side.reindex(every) for side in sides)
    found = welch(before, after)
    middle, error, degrees = (found[c] for c in ("middle", "error", "degrees"))
    limit = np.log(asked.set_index(["metric", "cell_id"])["limit"].reindex(every)).abs()
    beyond = (middle.abs() - limit).clip(lower=0)
    p_values = np.asarray(two_sided(beyond, error, degrees), float)
    half = half_width(error, degrees, adjusted(p_values)[1])
    return DataFrame(
        {
            "count_kept": before["count"].fillna(0).astype(int),
            "count_now": after["count"].fillna(0).astype(int),
            "ratio": np.exp(after["mean"] - before["mean"]),
            "ratio_low": np.exp(middle - half),
            "ratio_high": np.exp(middle + half),
            "detectable": np.exp(half + half_width(error, degrees, 2 * (1 - POWER))),
        }
    ).reset_index()


def welch(a: DataFrame, b: DataFrame) -> DataFrame:
    """Return `middle, error, degrees` of mean of b - mean of a, sample by sample, as Welch and Satterthwaite.

    Where either side has fewer than `MIN_BLOCKS` values they are empty.

    Args:
        a: `mean, variance, count` of logs, one row per sample.
        b: the same of the other side, with the same index.
    """
    a, b = a.astype(float), b.astype(float)  # an empty side has no numbers
    errors = [side["variance"] / side["count"] for side in (a, b)]
    squared = errors[0] + errors[1]
    # identical runs have no variance, and any number of degrees does
    spread = sum(e**2 / (side["count"] - 1) for e, side in zip(errors, (a, b), strict=True))
    degrees = (squared**2 / spread).where(squared > 0, 1.0)
    found = {"middle": b["mean"] - a["mean"], "error": np.sqrt(squared), "degrees": degrees}
    return DataFrame(found).where((a["count"] >= MIN_BLOCKS) & (b["count"] >= MIN_BLOCKS))


def _moments(good: DataFrame, metric: str, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return `mean, variance, count` per cell over the logs of valid runs, or of the ratios of blocks."""
    if metric == "speedup":
        logs = log_ratios(log_throughput_per_block(good), baselines)
        return moments(logs.groupby("cell_id", observed=True)["log_ratio"])
    values = numbers(good, metric)
    usable = np.isfinite(values) & (values > 0)
    return moments(np.log(values[usable]).groupby(good.loc[usable, "cell_id"], observed=True))


def changed(a: SweepTables, b: SweepTables) -> DataFrame:
    """Return what changed from sweep A to sweep B, the largest change on top.

    Returns:
        The rows of `diff` that are about speedups, A the kept side, with `change` (1.05: the speedup is 5 %
        larger in B), `change_low`, `change_high` and `claim` for its ratio, interval and verdict.

    Raises:
        VitsweepError: a sweep holds no run.
    """
    for side in (a, b):
        if side.runs.empty:
            raise VitsweepError("`a` and `b` must both hold runs: measure the one that holds none.")
    found = diff(b.runs, a.runs, a.baselines | b.baselines, mixed_hardware=True)
    ends = {f"ratio{end}": f"change{end}" for end in ("", "_low", "_high")}
    table = found[found["metric"] == "speedup"].rename(columns=ends | {"verdict": "claim"})
    table = table.replace({"claim": {WORSE: "worse"}})  # than it was at all
    order = np.log(table["change"]).abs().sort_values(ascending=False, kind="stable")
    return table.loc[order.index].reset_index(drop=True)
