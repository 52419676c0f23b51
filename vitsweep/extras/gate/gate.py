"""The gate for continuous integration: did any cell become worse than a kept baseline?"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from pandas import DataFrame, MultiIndex, Series

from vitsweep.errors import VitsweepError
from vitsweep.extras.gate.sweep_diff import changes, metric_named
from vitsweep.results.metrics import Metric, known_metrics
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, Status
from vitsweep.tables.formatting import count, plain, ratio, span, tally
from vitsweep.tables.names import cell_names
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import Claim, chosen
from vitsweep.tables.valid_runs import checked_runs, final_status, text, valid_runs

WORSE, GONE = "worse beyond tolerance", "no longer measured"
FELL = "accuracy fell"
PARTLY = "lost blocks"
TOO_FEW = "too few runs"
NO_STEP = "no number now"
NEW, ABSENT, NEVER = "new", "not run now", "not measured before"
NO_NUMBERS = "no numbers"
BASELINE_SLOWER = "baseline slower"
UNDECIDED = "undecided"
WITHIN = "worse within tolerance"
FAILING = (WORSE, GONE)
UNLESS_LENIENT = (FELL, PARTLY, TOO_FEW, NO_STEP, ABSENT, BASELINE_SLOWER)
"""Verdicts that fail the gate, but only warn if it is lenient."""
MOST_BLOCKS = 40
"""As many fresh blocks are advised at most for what is undecided."""
_ONE_SIDED = (NEW, ABSENT, NEVER)
THROUGHPUT, UNKNOWN = "images_per_second", "an unknown device"
ACCURACY, ACCURACY_TOLERANCE = "accuracy_top1", 0.01
"""Accuracy is compared wherever the kept side has it; it may not fall by more than this fraction."""
FAR = 0.05
"""Without an interval, accuracy has fallen where it is lower than accepted by more than this."""


@dataclass(frozen=True)
class Gate:
    """The verdict on a sweep.

    Attributes:
        rows: one row per cell and metric.
    """

    rows: DataFrame

    @property
    def passed(self) -> bool:
        """Whether no row fails, and none is undecided."""
        return not self.rows["fails"].any() and not self.undecided

    @property
    def undecided(self) -> bool:
        """Whether no row fails, but one is worse and may be so beyond the tolerance."""
        unsure = (self.rows["verdict"] == UNDECIDED) & ~self.rows["warns"]
        return bool(unsure.any()) and not self.rows["fails"].any()

    @property
    def blocks_to_decide(self) -> int:
        """Fresh blocks of each side that tell a loss of twice the tolerance from none, at most 40."""
        unsure = self.rows[self.rows["verdict"] == UNDECIDED]
        wanted = np.log(unsure["detectable"]) / np.log(unsure["limit"]).abs().clip(lower=1e-6)
        blocks = unsure[["count_kept", "count_now"]].min(axis=1) * wanted**2
        return int(np.clip(np.ceil(blocks.max()), 8, MOST_BLOCKS)) if len(unsure) else 0

    @property
    def caught(self) -> str:
        """The smallest change for the worse that would have failed with a probability of 80 %."""
        known = self.rows[self.rows["detectable"].notna() & (self.rows["metric"] != ACCURACY)]
        if known.empty:
            return ""
        up = known["limit"] <= 1
        seen = known["limit"] * known["detectable"].where(~up, 1 / known["detectable"])
        sizes = 100 * (seen - 1).abs()
        ends = span(sizes, lambda size: f"{size:.2g}")
        return say("gate_caught", ends=ends)

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
        shown = self.rows["fails"]
        if self.passed:
            shown = self.rows["ratio_high"].notna() | self.rows["warns"]
        elif self.undecided:
            shown = self.rows["verdict"] == UNDECIDED
        said = "passed" if self.passed else "is undecided" if self.undecided else "failed"
        verdicts = tally(self.rows.loc[shown, "verdict"])
        told_of = {"verdicts": verdicts, "caught": self.caught * self.passed}
        comparisons = count(self.num_compared, "comparison")
        return say("gate_verdict", said=said, comparisons=comparisons, **told_of)


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
    must cover them. Beside ratios the baselines are compared by images per second, unless the hardware is
    mixed. A cell that is worse, but whose interval reaches within the tolerance, leaves the gate undecided.

    A cell fails as well, or with `lenient` causes a warning, where its accuracy fell, where blocks
    are no longer measured although all were (out of memory in some of them, say), where either side
    has fewer than 3 runs, where no step was counted, and where it is gone from the sweep.

    Args:
        runs: one row per run of the sweep as it is now.
        kept: one row per run of the kept baseline (`runs.parquet`).
        tolerance: how much worse is accepted, as a fraction: with 0.05 throughput may fall to 0.95
            and step time rise to 1.05 of what it was. Accuracy may fall by 1 % at most.
        metrics: columns of `METRICS`, or headings of the printed table. Default: `speedup`; where a cell
            has none, as a baseline, its images per second stand for it.
        baselines: cell -> its baseline cell, for the metric `speedup`.
        mixed_hardware: compare cells although they ran on different devices.
        lenient: warn instead of fail where there is too little to tell.

    Returns:
        The gate; its rows have `cell_id, name, metric, verdict, fails, warns, ratio, ratio_low,
        ratio_high, reason, limit, detectable, count_kept, count_now, of_baseline`.

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
    columns = list(dict.fromkeys(metric_named(n, runs) for n in metrics or ["speedup"]))
    if not mixed_hardware:
        _refuse_other_devices(runs, kept)
    if ACCURACY in kept and kept[ACCURACY].notna().any():
        columns += [ACCURACY] * (ACCURACY not in columns)
        runs = runs if ACCURACY in runs else runs.assign(**{ACCURACY: float("nan")})
    of_cell, known = dict(baselines or {}), known_metrics(runs)
    asked = _asked(_cells(runs, kept), columns, of_cell, both)
    if mixed_hardware:
        asked = asked[~asked["of_baseline"]]
    wanted = MultiIndex.from_frame(asked[["metric", "cell_id"]])
    every = list(asked["metric"].unique())
    rows = (
        asked.merge(
            changes(runs, kept, every, (of_cell, of_cell), wanted=wanted, jointly=True),
            on=["cell_id", "metric"],
            how="left",
        )
        .pipe(_once_where_unmeasured, several=len(columns) > 1)
        .assign(
            better=lambda t: t["metric"].map(lambda metric: known[metric].better),
            limit=lambda t: [_limit(known[metric], tolerance) for metric in t["metric"]],
        )
        .assign(verdict=verdicts)
        .assign(
            fails=lambda t: t["verdict"].isin([*FAILING, *(() if lenient else UNLESS_LENIENT)]),
            warns=lambda t: (
                (t["verdict"].isin((*UNLESS_LENIENT, UNDECIDED)) & lenient)
                | ((t["verdict"] == UNDECIDED) & t["of_baseline"])
            ),
        )
        .assign(reason=lambda t: [_reason(row) for _, row in t.iterrows()])
    )
    _refuse_without_numbers(rows, every)
    shown = ["cell_id", "name", "metric", "verdict", "fails", "warns"]
    ratio = ["ratio", "ratio_low", "ratio_high", "reason", "limit", "detectable"]
    return Gate(rows[[*shown, *ratio, "count_kept", "count_now", "of_baseline"]])


def _asked(
    cells: DataFrame,
    columns: Sequence[str],
    baselines: Mapping[str, str | None],
    both: Collection[str],
) -> DataFrame:
    """Return a row `of_baseline, metric` more for each cell and metric.

    What has no speedup is compared by images per second: a baseline, and a cell without one on both sides.
    """
    rows = cells.merge(DataFrame({"metric": columns}), how="cross")
    base = rows["cell_id"].map(lambda cell: baselines.get(cell)).astype(object)
    is_own, is_ratio = base == rows["cell_id"], rows["metric"] == "speedup"
    alone = is_ratio & (is_own | ~base.isin(list(both)))
    rows = rows.assign(of_baseline=alone & is_own & (THROUGHPUT not in columns))
    return rows.assign(metric=rows["metric"].mask(alone, THROUGHPUT)).drop_duplicates(
        ["cell_id", "metric"]
    )


def _refuse_unmeasured(kept: DataFrame) -> None:
    if kept.empty or not (kept["status"] == Status.measured).any():
        raise VitsweepError(
            "The kept baseline holds no measured run: measure it again, then keep it."
        )


def _refuse_other_devices(runs: DataFrame, kept: DataFrame) -> None:
    devices = [_devices(side) for side in (runs, kept)]
    for cell in devices[0].index.intersection(devices[1].index):
        now, then = devices[0][cell] or UNKNOWN, devices[1][cell] or UNKNOWN
        if now != then or UNKNOWN in (now, then):
            raise VitsweepError(
                f"Cell {cell} ran on {now}, the kept baseline on {then}: their difference is not the "
                "code's. Keep a baseline of this device, or compare them all the same with "
                "`--mixed-hardware` (`mixed_hardware=True`)."
            )


def _refuse_without_numbers(rows: DataFrame, columns: Sequence[str]) -> None:
    """Refuse a metric that no cell has: such a gate could never fail."""
    for column in columns:
        said = rows.loc[rows["metric"] == column, "verdict"]
        if (said == NO_NUMBERS).any() and said.isin([*_ONE_SIDED, NO_NUMBERS]).all():
            raise VitsweepError(
                f"No cell has `{column}` above 0 on both sides, so it cannot be compared: choose "
                "another `--metric`."
            )


def _devices(runs: DataFrame) -> Series:
    good = valid_runs(runs)
    return text(good, "device").groupby(good["cell_id"].astype(object)).last()


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
    """Return what is said of each row, by its statuses, ratio with its interval, limit and lost blocks."""
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
        "better": (low > 1).where(up, high < 1),
    }
    return chosen(rules, Claim.no_difference_shown, table.index)


def _reason(row: Series) -> str:
    name, metric, verdict = f"{row['name']} ({row['cell_id']})", row["metric"], row["verdict"]
    if pd.notna(row["ratio"]) and (pd.notna(row["ratio_high"]) or metric == ACCURACY):
        accepted = "from" if row["better"] == "higher" else "up to"
        told_of = {
            "size": ratio(row["ratio"], row["ratio_low"], row["ratio_high"]),
            "verdict": verdict,
        }
        told_of |= {"accepted": accepted, "limit": row["limit"]}
        return say("gated", name=name, metric=_in_words(metric), **told_of)
    ended = plain(row["status_now"]).replace("_", " ")
    why = {
        GONE: f"{ended}: {plain(row['reason_now'])}".removesuffix(": ").removesuffix("."),
        PARTLY: count(row["lost_now"], "block"),
        TOO_FEW: f"{row['count_kept']:.0f} kept, {row['count_now']:.0f} now",
        NO_STEP: f"`{metric}`",
        NO_NUMBERS: f"`{metric}`",
    }.get(verdict, "")
    return say("gated_without", name=name, verdict=verdict, why=f" ({why})" if why else "")


def _in_words(column: str) -> str:
    return "throughput" if column == THROUGHPUT else f"`{column}`"
