"""The gate for continuous integration: did any cell become worse than a kept baseline?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import Metric, known_metrics
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, Status
from vitsweep.tables.formatting import count, plain, times
from vitsweep.tables.names import cell_names
from vitsweep.tables.stats import Claim
from vitsweep.tables.sweep_diff import compare_with_kept, metric_named
from vitsweep.tables.valid_runs import checked_runs, counted, final_status

WORSE, GONE = "worse beyond the tolerance", "no longer measured"
FELL = "accuracy fell"
PARTLY = "no longer measured in every block"
TOO_FEW = "too few runs"
NO_STEP = "no number any more"
NEW, ABSENT, NEVER = "new", "not in this sweep", "was not measured before"
NO_NUMBERS = "no numbers to compare"
FAILING = (WORSE, GONE)
UNLESS_LENIENT = (FELL, PARTLY, TOO_FEW, NO_STEP, ABSENT)
"""Verdicts that fail the gate, but only warn if it is lenient."""
_ONE_SIDED = (NEW, ABSENT, NEVER)
ACCURACY, ACCURACY_TOLERANCE = "accuracy_top1", 0.01
"""Accuracy is compared wherever the kept side has it; it may not fall by more than this fraction."""
FAR = 0.05
"""Without an interval, accuracy has fallen where it is lower than accepted by more than this."""


@dataclass(frozen=True)
class Gate:
    """The verdict on a sweep.

    Attributes:
        passed: whether no row fails.
        rows: one row per cell and metric.
    """

    passed: bool
    rows: DataFrame

    @property
    def num_compared(self) -> int:
        """Number of rows that compare measurements of now with kept ones, or that fail."""
        return int((self.rows["ratio_high"].notna() | self.rows["fails"]).sum())

    @property
    def sentences(self) -> list[str]:
        """One sentence per cell and metric, failing ones first, then warnings."""
        order = self.rows.assign(_ok=~self.rows["fails"], _quiet=~self.rows["warns"])
        ordered = order.sort_values(["_ok", "_quiet"], kind="stable")
        prefix = ordered["warns"].map({True: "Warning: ", False: ""})
        return [f"{p}{text}" for p, text in zip(prefix, ordered["reason"], strict=True)]

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.passed:
            warnings = int(self.rows["warns"].sum())
            also = f"; {count(warnings, 'warning')}" if warnings else ""
            compared = count(self.num_compared, "comparison")
            return f"The gate passed: {compared}, none worse beyond the tolerance{also}."
        kinds = self.rows.loc[self.rows["fails"], "verdict"].value_counts()
        return f"The gate failed: {', '.join(f'{n} {verdict}' for verdict, n in kinds.items())}."


def gate(
    runs: DataFrame,
    kept: DataFrame,
    tolerance: float = 0.05,
    metrics: Sequence[str] | None = None,
    baselines: Mapping[str, str | None] | None = None,
    mixed_hardware: bool = False,
    lenient: bool = False,
) -> Gate:
    """Compare every cell with its runs in a kept baseline.

    A cell fails where the whole interval of now / kept lies beyond the tolerance on the bad side of
    a metric, or where it was measured and now is not. The interval is Welch's over logs, at a level
    shared by all comparisons (Bonferroni), so that a wide sweep does not fail by number alone: with
    no true change and a tolerance of 0, at most one gate in twenty fails. The metric `speedup`, a
    ratio within blocks, does not contain differences between days; for another metric the tolerance
    must cover them.

    A cell fails as well, or with `lenient` causes a warning, where its accuracy fell, where blocks
    are no longer measured although all were (out of memory in some of them, say), where either side
    has fewer than 3 runs, where no step was counted, and where it is gone from the sweep.

    Args:
        runs: one row per run of the sweep as it is now.
        kept: one row per run of the kept baseline (`runs.parquet`).
        tolerance: how much worse is accepted, as a fraction: with 0.05 throughput may fall to 0.95
            and step time rise to 1.05 of what it was. Accuracy may fall by 1 % at most.
        metrics: columns of `METRICS`, or headings of the printed table. Default: `speedup`, or
            `images_per_second` where no cell has a baseline.
        baselines: cell -> its baseline cell, for the metric `speedup`.
        mixed_hardware: compare cells although they ran on different devices.
        lenient: warn instead of fail where there is too little to tell.

    Returns:
        The gate; its rows have `cell_id, name, metric, verdict, fails, warns, ratio, ratio_low,
        ratio_high, reason`.

    Raises:
        VitsweepError: tolerance or metric is wrong, the kept baseline was never measured, the two
            have no cell in common or none with numbers of a metric, or a cell ran on another device.
    """
    if not 0 <= tolerance < 1:
        raise VitsweepError(f"The tolerance must be within 0 and 1; got {tolerance}. Try 0.05.")
    runs, kept = (checked_runs(side, "reason") for side in (runs, kept))
    _refuse_unmeasured(kept)
    both = set(runs["cell_id"]) & set(kept["cell_id"])
    if not both:
        raise VitsweepError("The sweep and the kept baseline have no cell in common.")
    names = metrics or _default(baselines, both)
    columns = list(dict.fromkeys(metric_named(name, runs) for name in names))
    unpaired = {cell for cell in both if (baselines or {}).get(cell) is None}
    by_default = not metrics and columns == ["speedup"]
    if by_default and unpaired:
        columns.append("images_per_second")
    if not mixed_hardware:
        _refuse_other_devices(runs, kept)
    if ACCURACY in kept and kept[ACCURACY].notna().any():
        columns += [ACCURACY] * (ACCURACY not in columns)
        runs = runs if ACCURACY in runs else runs.assign(**{ACCURACY: float("nan")})
    known = known_metrics(runs)
    compared = compare_with_kept(runs, kept, columns, baselines)
    rows = (
        _cells(runs, kept)
        .merge(DataFrame({"metric": columns}), how="cross")
        .merge(compared, on=["cell_id", "metric"], how="left")
        .pipe(_own_default, unpaired if by_default else None)
        .pipe(_once_where_unmeasured, baselines, columns)
        .assign(
            better=lambda t: t["metric"].map(lambda metric: known[metric].better),
            limit=lambda t: [_limit(known[metric], tolerance) for metric in t["metric"]],
        )
        .assign(verdict=_verdicts)
        .assign(
            fails=lambda t: t["verdict"].isin([*FAILING, *(() if lenient else UNLESS_LENIENT)]),
            warns=lambda t: t["verdict"].isin(UNLESS_LENIENT) & lenient,
        )
        .assign(reason=lambda t: [_reason(row) for _, row in t.iterrows()])
    )
    _refuse_without_numbers(rows, columns)
    shown = ["cell_id", "name", "metric", "verdict", "fails", "warns"]
    ratio = ["ratio", "ratio_low", "ratio_high", "reason"]
    return Gate(
        passed=not rows["fails"].any(),
        rows=rows[[*shown, *ratio]],
    )


def _default(baselines: Mapping[str, str | None] | None, cells: set[str]) -> list[str]:
    paired = any(base in cells and base != cell for cell, base in (baselines or {}).items())
    return ["speedup"] if paired else ["images_per_second"]


def _own_default(table: DataFrame, unpaired: set[str] | None) -> DataFrame:
    """Compare cells without a baseline by their throughput, all others by their speedup."""
    if not unpaired:
        return table
    alone, metric = table["cell_id"].isin(unpaired), table["metric"]
    other = (alone & (metric == "speedup")) | (~alone & (metric == "images_per_second"))
    return table[~other].reset_index(drop=True)


def _refuse_unmeasured(kept: DataFrame) -> None:
    if kept.empty or not (kept["status"] == Status.measured).any():
        raise VitsweepError(
            "The kept baseline holds no measured run: measure it again, then keep it."
        )


def _refuse_other_devices(runs: DataFrame, kept: DataFrame) -> None:
    devices = [_devices(side) for side in (runs, kept)]
    for cell in devices[0].index.intersection(devices[1].index):
        now, then = devices[0][cell], devices[1][cell]
        if now != then:
            raise VitsweepError(
                f"Cell {cell} ran on {now}, the kept baseline on {then}: their difference is not the "
                "code's. Keep a baseline of this device, or compare them all the same with "
                "`--mixed-hardware` (`mixed_hardware=True`)."
            )


def _refuse_without_numbers(rows: DataFrame, columns: Sequence[str]) -> None:
    """Refuse a metric that no cell has: such a gate could never fail."""
    for column in columns:
        verdicts = rows.loc[rows["metric"] == column, "verdict"]
        if (verdicts == NO_NUMBERS).any() and verdicts.isin([*_ONE_SIDED, NO_NUMBERS]).all():
            raise VitsweepError(
                f"No cell has `{column}` above 0 on both sides, so it cannot be compared: choose "
                "another `--metric`."
            )


def _devices(runs: DataFrame) -> Series:
    good = counted(runs)
    if "device" not in good:
        return Series(dtype=object)
    return good.dropna(subset="device").groupby("cell_id", observed=True)["device"].last()


def _cells(runs: DataFrame, kept: DataFrame) -> DataFrame:
    """Return one row per cell of either side: `cell_id, name`, status and reason of both."""
    sides = [
        final_status(side)[["cell_id", "status", "reason"]]
        .rename(columns={"status": f"status_{name}", "reason": f"reason_{name}"})
        for side, name in ((kept, "kept"), (runs, "now"))
    ]  # fmt: skip
    every = pd.concat([runs, kept]).drop_duplicates("cell_id", keep="first").reset_index(drop=True)
    names = DataFrame({"cell_id": every["cell_id"], "name": cell_names(every)})
    lost = [_lost_blocks(side).add_suffix(f"_{n}") for side, n in ((kept, "kept"), (runs, "now"))]
    return (
        sides[0]
        .merge(sides[1], on="cell_id", how="outer")
        .merge(names, on="cell_id")
        .join(lost[0], on="cell_id")
        .join(lost[1], on="cell_id")
        .fillna({c: 0 for c in ("lost_kept", "lost_now", "lost_share_kept", "lost_share_now")})
    )


def _lost_blocks(runs: DataFrame) -> DataFrame:
    """Return by cell how many blocks hold no measured run, and which share of its blocks that is.

    Runs that were killed or preempted say nothing about their cell and do not count.
    """
    own = runs[~runs["status"].isin([str(s) for s in STOPPED_FROM_OUTSIDE])]
    good = (own["status"] == Status.measured).groupby([own["cell_id"], own["block"]]).any()
    lost = (~good).groupby(level=0)
    return DataFrame({"lost": lost.sum(), "lost_share": lost.mean()})


def _once_where_unmeasured(
    table: DataFrame, baselines: Mapping[str, str | None] | None, columns: Sequence[str]
) -> DataFrame:
    """Keep one row of a cell without a comparison; a baseline's speedup, always 1, gets none."""
    measured = (table["status_kept"] == Status.measured) & (table["status_now"] == Status.measured)
    again = table["cell_id"].duplicated() & ~measured
    is_baseline = table["cell_id"].map(lambda c: (baselines or {}).get(c) == c).astype(bool)
    is_one = measured & (table["metric"] == "speedup") & table["ratio"].isna() & is_baseline
    never = ~(table["count_kept"] > 0)
    optional = (table["metric"] == ACCURACY) & never & (len(columns) > 1) & measured
    return table[~again & ~is_one & ~optional].reset_index(drop=True)


def _limit(metric: Metric, tolerance: float) -> float:
    if metric.column == ACCURACY:
        return 1 - min(tolerance, ACCURACY_TOLERANCE)
    return 1 - tolerance if metric.better == "higher" else 1 + tolerance


def _verdicts(table: DataFrame) -> Series:
    was = table["status_kept"] == Status.measured
    low, high = table["ratio_low"], table["ratio_high"]
    up = table["better"] == "higher"
    limit, accuracy = table["limit"], table["metric"] == ACCURACY
    gone = (table["count_kept"] > 0) & ~(table["count_now"] > 0)
    rules = {
        NEW: table["status_kept"].isna(),
        ABSENT: table["status_now"].isna(),
        GONE: was & (table["status_now"] != Status.measured),
        NEVER: ~was,
        FELL: accuracy & (gone | (high < limit) | (high.isna() & (table["ratio"] < limit - FAR))),
        WORSE: ~accuracy & (high < limit).where(up, low > limit),
        PARTLY: table["lost_share_now"] > table["lost_share_kept"],
        NO_STEP: gone,
        NO_NUMBERS: table["ratio"].isna(),
        TOO_FEW: high.isna() & (~accuracy | (table["ratio"] < limit)),
        Claim.no_difference_shown: high.isna(),
        "worse within the tolerance": (high < 1).where(up, low > 1),
        "better": (low > 1).where(up, high < 1),
    }
    return Series(
        np.select(
            [np.asarray(r, bool) for r in rules.values()], list(rules), Claim.no_difference_shown
        ),
        table.index,
    )


def _reason(row: Series) -> str:
    name = f"{row['name']} ({row['cell_id']})"
    if row["verdict"] == GONE:
        why = plain(row["reason_now"])
        return f"{name} was measured and is now {plain(row['status_now']).replace('_', ' ')}" + (
            f": {why}" if why else "."
        )
    metric = row["metric"]
    if row["verdict"] == PARTLY:
        return (
            f"{name} is not measured in {count(row['lost_now'], 'block')}, a larger share than of the "
            "kept ones: see the reasons in its runs."
        )
    if row["verdict"] == NO_STEP:
        why = "no step was counted"
        if metric == "speedup":
            why += ", or its baseline was not measured"
        return f"{name}: `{metric}` has no value any more: {why}."
    if row["verdict"] == FELL:
        if pd.isna(row["ratio"]):
            return f"{name}: accuracy was measured and is now missing or 0."
        size = f"{times(row['ratio'])} the kept one; at least {row['limit']:.3g} is accepted"
        return f"{name}: accuracy is {size}."
    if row["verdict"] == TOO_FEW:
        runs = f"{row['count_kept']:.0f} kept, {row['count_now']:.0f} now; an interval needs 3"
        return f"{name}: too few runs ({runs})."
    if row["verdict"] == NO_NUMBERS:
        return f"{name}: no numbers to compare (`{metric}`)."
    if pd.isna(row["ratio_high"]):
        return f"{name}: {row['verdict']}."
    interval = f"[{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
    accepted = "from" if row["better"] == "higher" else "up to"
    return (
        f"{name}: {times(row['ratio'])} the kept {_in_words(metric)}, interval {interval}, "
        f"accepted {accepted} {row['limit']:.3g}: {row['verdict']}."
    )


def _in_words(column: str) -> str:
    return "throughput" if column == "images_per_second" else f"`{column}`"
