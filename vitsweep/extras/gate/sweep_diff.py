"""The same cells measured twice, on two days, machines or states of the code, and what changed."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from pandas import DataFrame, MultiIndex, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import headings, known_metrics
from vitsweep.results.record import Status
from vitsweep.tables.blocks import log_ratios, log_throughput_per_block
from vitsweep.tables.cells import cells
from vitsweep.tables.cost import numbers
from vitsweep.tables.formatting import count, ratio
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import (
    LEVEL,
    MIN_BLOCKS,
    POWER,
    SHOWN,
    Claim,
    chosen,
    half_width,
    holm,
    moments,
    two_sided,
)
from vitsweep.tables.valid_runs import checked_runs, valid_runs

SIDES = ("a", "b")
CHANGE = {"ratio": "change", "ratio_low": "change_low", "ratio_high": "change_high"}
COLUMNS = (
    "cell_id baseline_cell_id status_a status_b device_a device_b images_per_second_a "
    "images_per_second_b throughput_ratio speedup_a speedup_a_low speedup_a_high speedup_b "
    "speedup_b_low speedup_b_high num_blocks_a num_blocks_b change change_low change_high p_value "
    "p_holm claim"
).split()


def sweep_diff(
    runs_a: DataFrame,
    runs_b: DataFrame,
    baselines_a: Mapping[str, str | None],
    baselines_b: Mapping[str, str | None],
) -> DataFrame:
    """Compare the speedups of cells between two sweeps that share their baselines.

    A cell's speedup is over its baseline within blocks, so what differs between the days or machines
    as a whole (clocks, drivers, temperature) has cancelled on each side before the sides are
    compared. change = exp(mean log ratio in B - mean log ratio in A), a ratio of ratios; its 95 %
    interval is Welch's over the blocks of both sides (from 12 blocks of a side on with `stats.spread`),
    p-values are adjusted over the cells (Holm 1979). Baselines themselves are not compared:
    `throughput_ratio`, images/s in B over A from the medians, holds everything that differs between the
    sides and has no interval.

    Args:
        runs_a: one row per run of the first sweep, in the columns of the store.
        runs_b: the same of the second.
        baselines_a: cell -> its baseline in the first sweep.
        baselines_b: the same of the second.

    Returns:
        One row per cell of either side: status, device, median img/s, speedup with its interval and
        blocks on each side, `change` (1.05: the speedup is 5 % larger in B), `p_holm` and `claim`:
        `faster`, `slower` (its speedup is larger or smaller in B), `no difference shown`,
        `too few blocks`, `baseline`,
        `only in A`, `only in B`, `other baseline`, `status changed` (measured on one side only) or
        empty where neither side was measured. The largest changes come first.

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    sides = [_side(runs_a, baselines_a), _side(runs_b, baselines_b)]
    if sides[0].empty and sides[1].empty:
        return DataFrame(columns=COLUMNS)
    changed = changes(
        checked_runs(runs_b), checked_runs(runs_a), baselines=(baselines_b, baselines_a)
    )
    table = sides[0].merge(sides[1], on="cell_id", how="outer", suffixes=("_a", "_b"), sort=False)
    names = {f"speedup_{end}_{s}": f"speedup_{s}_{end}" for s in SIDES for end in ("low", "high")}
    return (
        table.rename(columns=names)
        .merge(changed.rename(columns=CHANGE)[["cell_id", *CHANGE.values(), "p_value"]], how="left")
        .assign(
            throughput_ratio=lambda t: t["images_per_second_b"] / t["images_per_second_a"],
            baseline_cell_id=lambda t: t["baseline_b"].fillna(t["baseline_a"]),
        )
        .pipe(_with_claims)
        .sort_values(["claim", "change"], key=_largest_first, kind="stable", ignore_index=True)
        .reindex(columns=COLUMNS)
    )


def changes_in_words(table: DataFrame) -> str:
    """Return one sentence: how many speedups changed, and which most."""
    compared = table[table["change"].notna() & table["p_holm"].notna()]
    changed = compared[compared["claim"].isin(SHOWN)]
    largest = ""
    if len(changed):
        first = changed.iloc[0]
        size = ratio(first["change"], first["change_low"], first["change_high"])
        largest = f", most {first['cell_id']}: {size}"
    every = count(len(compared), "speedup")
    return say("changed", changed=len(changed), speedups=every, largest=largest)


def _side(runs: DataFrame, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return one row per cell of a side: that of the device which measured it last."""
    names = {
        "unadjusted_images_per_second": "images_per_second",
        "baseline_cell_id": "baseline",
        "num_pairs": "num_blocks",
    }
    same = ["cell_id", "status", "device", "speedup", "speedup_low", "speedup_high"]
    rows = cells(runs, baselines).reindex(columns=[*same, *names]).rename(columns=names)
    return rows.drop_duplicates("cell_id", keep="last") if len(rows) else rows.astype(object)


def _largest_first(column: Series) -> Series:
    """Return by what rows are sorted: changes that are shown first, the largest of them first."""
    if column.name == "claim":
        return ~column.isin(SHOWN)
    return -column.astype(float).map(np.log).abs()


def _with_claims(table: DataFrame) -> DataFrame:
    measured = {s: table[f"status_{s}"].astype(object) == Status.measured for s in SIDES}
    same = table["baseline_a"] == table["baseline_b"]
    comparable = same & measured["a"] & measured["b"]
    table = table.assign(
        **{
            c: table[c].where(comparable)
            for c in ("change", "change_low", "change_high", "p_value")
        }
    )
    table = table.assign(
        p_holm=holm(table["p_value"]),
        **{f"num_blocks_{s}": table[f"num_blocks_{s}"].fillna(0).astype(int) for s in SIDES},
    )
    rules = {
        "only in A": table["status_b"].isna(),
        "only in B": table["status_a"].isna(),
        "status changed": measured["a"] != measured["b"],
        Claim.nothing: ~measured["a"],
        Claim.baseline: (table["baseline_b"] == table["cell_id"]) & same,
        "other baseline": ~same,
        Claim.too_few_blocks: table["p_value"].isna(),
        Claim.no_difference_shown: ~(table["p_holm"] < LEVEL),
        Claim.faster: table["change"] > 1,
    }
    return table.assign(claim=chosen(rules, Claim.slower, table.index))


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


def changes(
    now: DataFrame,
    kept: DataFrame,
    metrics: Sequence[str] = ("speedup",),
    baselines: tuple[Mapping[str, str | None], Mapping[str, str | None]] = ({}, {}),
    wanted: MultiIndex | None = None,
    jointly: bool = False,
) -> DataFrame:
    """Compare the metrics of every cell with kept runs of it: another day, machine or code.

    One observation is a run; for `speedup` it is a block, whose ratio over the cell's baseline does
    not contain what differs between the days as a whole. Values that are missing, not finite or not above 0
    are left out. Intervals are Welch's over logs; from 12 values of a side on they are wider where
    neighbours resemble each other (`stats.spread`).

    Args:
        now: one row per run, oldest first (`checked_runs`).
        kept: the same of the kept side.
        metrics: columns of `METRICS`.
        baselines: cell -> its baseline cell, of now and of the kept side, for `speedup`.
        wanted: (metric, cell id) of the rows that are compared; default: all.
        jointly: intervals hold at 95 % for all rows together (Bonferroni), not each by itself.

    Returns:
        One row per cell and metric that has values in `now` or `kept`: `cell_id, metric,
        count_kept, count_now, ratio` (now / kept), `ratio_low, ratio_high, p_value` (empty with fewer than
        3 values in either), `detectable`: the factor beyond any limit that is shown to lie beyond it
        with 80 % probability.
    """
    sides = [
        pd.concat({m: _moments(good, m, base) for m in metrics}, names=["metric"])
        for side, base in zip((kept, now), baselines[::-1], strict=True)
        for good in (valid_runs(side) if len(side) else side,)
    ]
    every = sides[0].index.union(sides[1].index, sort=False)
    if wanted is not None:
        every = every[every.isin(wanted)]
    before, after = (sample.reindex(every) for sample in sides)
    counts = {
        f"count_{name}": side["count"].fillna(0).astype(int)
        for name, side in (("kept", before), ("now", after))
    }
    tested = max(int((DataFrame(counts) >= MIN_BLOCKS).all(axis=1).sum()), 1)
    found = welch(before, after, LEVEL / tested if jointly else LEVEL)
    ends = {"low": "ratio_low", "high": "ratio_high"}
    return found.rename(columns=ends).assign(**counts).reset_index()


def welch(a: DataFrame, b: DataFrame, level: float = LEVEL) -> DataFrame:
    """Return `ratio, low, high, p_value, detectable`: exp(mean of b - mean of a), sample by sample.

    A true ratio further from a limit than the factor `detectable` has its whole interval beyond the limit
    with probability `POWER`. The interval is Welch's with Satterthwaite's degrees of freedom. Where
    either side has fewer than `MIN_BLOCKS` values it is empty.

    Args:
        a: `mean, variance, count` of logs, one row per sample.
        b: the same of the other side, with the same index.
        level: probability that an interval misses the truth.
    """
    a, b = a.astype(float), b.astype(float)  # an empty side has no numbers
    counts = [side["count"].fillna(0).astype(int) for side in (a, b)]
    comparable = (counts[0] >= MIN_BLOCKS) & (counts[1] >= MIN_BLOCKS)
    errors = [side["variance"] / side["count"] for side in (a, b)]
    squared = errors[0] + errors[1]
    # identical runs have no variance, and any number of degrees does
    spread = sum(e**2 / (side["count"] - 1) for e, side in zip(errors, (a, b), strict=True))
    degrees = (squared**2 / spread).where(squared > 0, 1.0)
    middle, error = b["mean"] - a["mean"], np.sqrt(squared)
    half = half_width(error, degrees, level).where(comparable)
    p_value = Series(two_sided(middle, error, degrees), middle.index)
    return DataFrame(
        {
            "ratio": np.exp(middle),
            "low": np.exp(middle - half),
            "high": np.exp(middle + half),
            "p_value": p_value.where(comparable),
            "detectable": np.exp(half + half_width(error, degrees, 2 * (1 - POWER))).where(
                comparable
            ),
        }
    )


def _moments(good: DataFrame, metric: str, baselines: Mapping[str, str | None]) -> DataFrame:
    """Return `mean, variance, count` per cell over the logs of valid runs, or of the ratios of blocks."""
    if metric == "speedup":
        logs = log_ratios(log_throughput_per_block(good), baselines)
        return moments(logs.groupby("cell_id", observed=True)["log_ratio"])
    values = numbers(good, metric)
    usable = np.isfinite(values) & (values > 0)
    return moments(np.log(values[usable]).groupby(good.loc[usable, "cell_id"], observed=True))
