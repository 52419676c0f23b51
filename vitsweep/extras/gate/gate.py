"""The gate for continuous integration: did any cell become worse than a kept baseline?"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.extras.gate.diff import (
    ABSENT,
    ACCURACY,
    BASELINE_SLOWER,
    BETTER,
    FELL,
    GONE,
    NEVER,
    NEW,
    NO_NUMBERS,
    NO_STEP,
    PARTLY,
    THROUGHPUT,
    TOO_FEW,
    UNDECIDED,
    WORSE,
    diff,
)
from vitsweep.results.record import Status
from vitsweep.tables.formatting import count, number, plain, ratio, span, tally
from vitsweep.tables.notes import starts, two_starts
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import Claim
from vitsweep.tables.valid_runs import checked_runs, text, valid_runs

UNLESS_LENIENT = (GONE, FELL, PARTLY, TOO_FEW, NO_STEP, ABSENT, BASELINE_SLOWER)
"""Verdicts that fail the gate as `WORSE` does, but only warn if it is lenient."""
BLIND = 0.5
"""A cell without a shown change, of which only a loss above this fraction would be shown, is undecided,
unless its whole interval lies within the tolerance."""
MOST_BLOCKS = 40
"""As many fresh blocks are advised at most for what is undecided."""
RESIDENT = ("peak_gib", "peak_rss_gib")
"""Metrics of memory that forked ranks share."""
_ONE_SIDED = (NEW, ABSENT, NEVER)
UNKNOWN = "an unknown device"


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
        """Whether no row fails, but one is or hides a loss that may lie beyond the tolerance."""
        return bool(self._unsure.any()) and not self.rows["fails"].any()

    @property
    def _unsure(self) -> Series:
        return (self.rows["verdict"] == UNDECIDED) & ~self.rows["warns"]

    @property
    def blocks_to_decide(self) -> int:
        """Fresh blocks of each side that tell a loss of twice the tolerance from none, at most 40."""
        unsure = self.rows[self._unsure]
        wanted = np.log(unsure["detectable"]) / np.log(unsure["limit"]).abs().clip(lower=1e-6)
        blocks = unsure[["count_kept", "count_now"]].min(axis=1) * wanted**2
        return int(np.clip(np.ceil(blocks.max()), 8, MOST_BLOCKS)) if len(unsure) else 0

    @property
    def caught(self) -> str:
        """The smallest change for the worse that would have failed with a probability of 80 %."""
        known = self.rows[self.rows["metric"] != ACCURACY]
        sizes = 100 * _least_loss(known).dropna()
        if sizes.empty:
            return ""
        return say("gate_caught", ends=span(sizes, lambda size: number(size, 2)))

    @property
    def faster(self) -> str:
        """The baselines that became faster, which lowers the ratios over them."""
        faster = self.rows[(self.rows["verdict"] == BETTER) & self.rows["is_baseline"]]
        found = [f"{row['name']} ({_size(row)})" for row in faster.to_dict("records")]
        return say("gate_faster", names=", ".join(found)) if found else ""

    @property
    def num_compared(self) -> int:
        """Number of rows that compare measurements of now with kept ones, or that fail."""
        return int((self.rows["ratio_high"].notna() | self.rows["fails"]).sum())

    @property
    def sentences(self) -> list[str]:
        """One sentence per cell and metric, failing ones first, then undecided ones and warnings."""
        told = self.rows["warns"] | (self.rows["verdict"] == UNDECIDED)
        order = self.rows.assign(_ok=~self.rows["fails"], _quiet=~told)
        ordered = order.sort_values(["_ok", "_quiet", "warns"], kind="stable")
        prefix = ordered["warns"].map({True: "Warning: ", False: ""})
        return [f"{p}{text}" for p, text in zip(prefix, ordered["reason"], strict=True)]

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        shown = self.rows["fails"]
        if self.passed:
            shown = self.rows["ratio_high"].notna() | self.rows["warns"]
        elif self.undecided:
            shown = self._unsure
        said = "passed" if self.passed else "is undecided" if self.undecided else "failed"
        verdicts = tally(self.rows.loc[shown, "verdict"])
        told_of = {"verdicts": verdicts, "caught": self.caught * self.passed, "faster": self.faster}
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

    A cell fails where the whole interval of now / kept (see `diff`) lies beyond the tolerance on the bad side
    of a metric. The metric `speedup`, a ratio within blocks, does not contain differences between days; for
    another metric the tolerance must cover them. Besides ratios the baselines are compared by images per
    second, unless the hardware is mixed. A cell that is worse, but whose interval reaches within the
    tolerance, leaves the gate undecided, and so does one without a shown change whose interval reaches
    beyond the tolerance and whose noise hides a loss of half; of a baseline that other cells are compared
    with, either is a warning.

    A cell fails as well, or with `lenient` causes a warning, where it is no longer measured, where its
    accuracy fell, where blocks are no longer measured although all were (out of memory in some of them, say),
    where either side has fewer than 3 runs, where no step was counted, and where it is gone from the sweep.

    Args:
        runs: one row per run of the sweep as it is now.
        kept: one row per run of the kept baseline (`runs.parquet`).
        tolerance: how much worse is accepted, as a fraction: with 0.05 throughput may fall to 0.95
            and step time rise to 1.05 of what it was. Accuracy may fall by 1 % at most.
        metrics: columns of `METRICS`, or headings of the printed table. Default: `speedup`; where a cell
            has none, as a baseline, its images per second stand for it.
        baselines: cell -> its baseline cell, for the metric `speedup`.
        mixed_hardware: compare cells although they ran on different devices.
        lenient: fail for what is worse alone, and warn of all else.

    Returns:
        The gate; its rows have `cell_id, name, metric, verdict, fails, warns, ratio, ratio_low,
        ratio_high, reason, better, limit, detectable, count_kept, count_now, of_baseline,
        is_baseline`.

    Raises:
        VitsweepError: tolerance or metric is wrong, the kept baseline was never measured, the two
            have no cell in common or none with numbers of a metric, or a cell ran on another device.
    """
    if not 0 <= tolerance < 1:
        raise VitsweepError(f"`tolerance={tolerance}` must be within 0 and 1. Try 0.05.")
    runs, kept = (checked_runs(side, "reason") for side in (runs, kept))
    _refuse_unmeasured(kept)
    if not set(runs["cell_id"]) & set(kept["cell_id"]):
        lost = {*text(kept, "precision")} - {*text(runs, "precision")}
        typed = "".join(f", with `precision={name}`" for name in sorted(lost))
        raise VitsweepError(
            f"The sweep has no cell of `--against`: measure those cells in it{typed}."
        )
    if not mixed_hardware:
        _refuse_other_devices(runs, kept)
    asked = metrics or ["speedup"]
    rows = diff(runs, kept, baselines or {}, asked, tolerance, mixed_hardware=mixed_hardware)
    higher = rows["better"] == "higher"
    is_within = (rows["ratio_low"] >= rows["limit"]).where(
        higher, rows["ratio_high"] <= rows["limit"]
    )
    unshown = (rows["verdict"] == Claim.no_difference_shown) & ~is_within
    hidden = _least_loss(rows).where(unshown)
    verdict = rows["verdict"].mask(hidden > BLIND, UNDECIDED)
    has_ratios = bool((rows["metric"] == "speedup").any())
    rows = rows.assign(
        verdict=verdict,
        fails=verdict.isin([WORSE, *(() if lenient else UNLESS_LENIENT)]),
        warns=(verdict.isin((*UNLESS_LENIENT, UNDECIDED)) & lenient)
        | ((verdict == UNDECIDED) & rows["of_baseline"] & has_ratios),
    )
    now, then = (rows["cell_id"].map(starts(side, "cell_id")) for side in (runs, kept))
    facts = rows.assign(hidden=hidden, started_now=now, started_kept=then)
    rows["reason"] = [_reason(row) for row in facts.to_dict("records")]
    _refuse_without_numbers(rows)
    shown = ["cell_id", "name", "metric", "verdict", "fails", "warns"]
    ratio = ["ratio", "ratio_low", "ratio_high", "reason", "better", "limit", "detectable"]
    return Gate(rows[[*shown, *ratio, "count_kept", "count_now", "of_baseline", "is_baseline"]])


def _refuse_unmeasured(kept: DataFrame) -> None:
    if kept.empty or not (kept["status"] == Status.measured).any():
        raise VitsweepError(
            "`--against` holds no measured run: measure the baseline again, then keep it."
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


def _refuse_without_numbers(rows: DataFrame) -> None:
    """Refuse a metric that no cell has: such a gate could never fail."""
    for column, said in rows.groupby("metric", sort=False)["verdict"]:
        if (said == NO_NUMBERS).any() and said.isin([*_ONE_SIDED, NO_NUMBERS]).all():
            raise VitsweepError(
                f"No cell has `{column}` above 0 on both sides, so it cannot be compared: choose "
                "another `--metric`."
            )


def _devices(runs: DataFrame) -> Series:
    good = valid_runs(runs)
    return text(good, "device").groupby(good["cell_id"].astype(object)).last()


def _least_loss(rows: DataFrame) -> Series:
    """Return the smallest change for the worse that fails a row with a probability of 80 %, as a fraction."""
    worse = rows["detectable"].where(rows["better"] != "higher", 1 / rows["detectable"])
    return (rows["limit"] * worse - 1).abs()


def _reason(row: Mapping[Hashable, Any]) -> str:
    name, verdict = f"{row['name']} ({row['cell_id']})", row["verdict"]
    metric = "throughput" if row["metric"] == THROUGHPUT else f"`{row['metric']}`"
    if pd.notna(row["ratio"]) and (pd.notna(row["ratio_high"]) or row["metric"] == ACCURACY):
        accepted = "from" if row["better"] == "higher" else "up to"
        told_of = {
            "metric": metric,
            "size": _size(row),
            "accepted": accepted,
            "limit": row["limit"],
        }
        loss = number(100 * row["hidden"], 2)
        notes = say("gate_hidden", loss=loss) if row["hidden"] > BLIND else ""
        if row["metric"] in RESIDENT:
            apart = two_starts(row["started_now"], row["started_kept"], "the kept ones")
            notes += f"; {apart}" if apart else ""
        return say("gated", name=name, verdict=verdict, notes=notes, **told_of)
    ended = plain(row["status_now"]).replace("_", " ")
    why = {
        GONE: f"{ended}: {plain(row['reason_now'])}".removesuffix(": ").removesuffix("."),
        PARTLY: f"{metric}: {count(row['lost_now'], 'block')}",
        TOO_FEW: f"{metric}: {row['count_kept']:.0f} kept, {row['count_now']:.0f} now",
        NO_STEP: metric,
        NO_NUMBERS: metric,
        FELL: metric,
    }.get(verdict, "")
    return say("gated_without", name=name, verdict=verdict, why=f" ({why})" if why else "")


def _size(row: Mapping[Hashable, Any]) -> str:
    return ratio(row["ratio"], row["ratio_low"], row["ratio_high"])
