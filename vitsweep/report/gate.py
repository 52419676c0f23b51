"""The gate: has anything become slower than a kept baseline, beyond noise and tolerance?"""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from pandas import DataFrame, Series
from scipy.special import stdtrit

from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables.names import cell_names
from vitsweep.tables.speedup import LEVEL, MIN_BLOCKS
from vitsweep.tables.status import counted, final_status
from vitsweep.tables.words import plain, times

FAILING = ("slower beyond the tolerance", "no longer measured")


@dataclass(frozen=True)
class Gate:
    """The verdict on a sweep: `passed`, and one row per cell in `rows`."""

    passed: bool
    rows: DataFrame

    @property
    def sentences(self) -> list[str]:
        """One sentence per cell, the failing ones first."""
        order = self.rows.assign(_ok=~self.rows["fails"]).sort_values("_ok", kind="stable")
        return [str(text) for text in order["reason"]]


def gate(runs: DataFrame, kept: DataFrame, tolerance: float = 0.05) -> Gate:
    """Compare the throughput of every cell with its kept runs.

    A cell fails where the whole interval of now / kept lies below 1 - `tolerance`, or where it was
    measured and now is not. The interval is Welch's over log throughput of the runs, at a level
    shared by all cells compared (Bonferroni), so that a wide sweep does not fail by number alone.
    The two sides were measured on different days: the tolerance must cover what lies between.
    Cells with fewer than 3 runs on a side, on another device, or on one side only never fail.

    Args:
        runs: one row per run of the sweep as it is now.
        kept: one row per run of the kept baseline (`runs.parquet`).
        tolerance: how much slower is accepted, as a fraction.

    Returns:
        The gate; its rows have `cell_id, name, verdict, fails, ratio, ratio_low, ratio_high, reason`.

    Raises:
        VitsweepError: the tolerance is not within 0 and 1, or the two have no cell in common.
    """
    if not 0 <= tolerance < 1:
        raise VitsweepError(f"The tolerance must be within 0 and 1; got {tolerance}. Try 0.05.")
    table = _sides(kept, "kept").merge(_sides(runs, "now"), on="cell_id", how="outer")
    both = table[["status_kept", "status_now"]].notna().all(axis=1)
    if not both.any():
        raise VitsweepError("The sweep and the kept baseline have no cell in common.")
    rows = (
        table.merge(_names(runs, kept), on="cell_id", how="left")
        .pipe(_with_ratio)
        .assign(verdict=lambda t: _verdicts(t, tolerance))
        .assign(fails=lambda t: t["verdict"].isin(FAILING))
        .assign(reason=lambda t: [_reason(row, tolerance) for _, row in t.iterrows()])
    )
    columns = ["cell_id", "name", "verdict", "fails", "ratio", "ratio_low", "ratio_high", "reason"]
    return Gate(passed=not rows["fails"].any(), rows=rows[columns])


def _sides(runs: DataFrame, side: str) -> DataFrame:
    good = counted(runs)
    throughput = np.log(good["images_per_second"].astype(float))
    groups = good.assign(_log=throughput).groupby("cell_id", observed=True)
    device = groups["device"].last() if "device" in good else Series(dtype=object)
    statistics = DataFrame(
        {
            "mean": groups["_log"].mean(),
            "variance": groups["_log"].var(),
            "count": groups["_log"].count(),
            "device": device,
        }
    )
    status = final_status(runs).set_index("cell_id")[["status", "reason"]]
    return status.join(statistics).add_suffix(f"_{side}").reset_index()


def _with_ratio(table: DataFrame) -> DataFrame:
    counts = table[["count_kept", "count_now"]]
    comparable = (counts >= MIN_BLOCKS).all(axis=1) & _same_device(table)
    errors = [table[f"variance_{s}"] / table[f"count_{s}"] for s in ("kept", "now")]
    squared = errors[0] + errors[1]
    # Welch-Satterthwaite; identical runs have no variance and any number of degrees does
    parts = [e**2 / (table[f"count_{s}"] - 1) for e, s in zip(errors, ("kept", "now"), strict=True)]
    degrees = (squared**2 / (parts[0] + parts[1])).where(squared > 0, 1.0)
    quantile = stdtrit(degrees, 1 - LEVEL / 2 / max(int(comparable.sum()), 1))
    middle = (table["mean_now"] - table["mean_kept"]).where(_same_device(table))
    half = (quantile * np.sqrt(squared)).where(comparable)
    return table.assign(
        ratio=np.exp(middle), ratio_low=np.exp(middle - half), ratio_high=np.exp(middle + half)
    )


def _same_device(table: DataFrame) -> "Series[bool]":
    kept, now = table["device_kept"], table["device_now"]
    return kept.eq(now) | kept.isna() | now.isna()


def _verdicts(table: DataFrame, tolerance: float) -> Series:
    was = table["status_kept"] == Status.measured
    rules = {
        "new": table["status_kept"].isna(),
        "not in this sweep": table["status_now"].isna(),
        "no longer measured": was & (table["status_now"] != Status.measured),
        "was not measured before": ~was,
        "other device": ~_same_device(table),
        "too few runs": table["ratio_high"].isna(),
        "slower beyond the tolerance": table["ratio_high"] < 1 - tolerance,
        "slower within the tolerance": table["ratio_high"] < 1,
        "faster": table["ratio_low"] > 1,
    }
    return Series(
        np.select(list(rules.values()), list(rules), default="no difference shown"), table.index
    )


def _reason(row: Series, tolerance: float) -> str:
    name = f"{row['name']} ({row['cell_id']})"
    if row["verdict"] == "no longer measured":
        why = plain(row["reason_now"])
        return f"{name} was measured and is now {plain(row['status_now']).replace('_', ' ')}" + (
            f": {why}" if why else "."
        )
    if row["verdict"] == "other device":
        return f"{name} ran on {row['device_now']}, the baseline on {row['device_kept']}: not compared."
    if pd.isna(row["ratio_high"]):
        return f"{name}: {row['verdict']}."
    interval = f"[{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]"
    return (
        f"{name}: {times(row['ratio'])} the kept throughput, interval {interval}, "
        f"accepted from {1 - tolerance:.3g}: {row['verdict']}."
    )


def _names(runs: DataFrame, kept: DataFrame) -> DataFrame:
    cells = pd.concat([runs, kept]).drop_duplicates("cell_id", keep="first").reset_index(drop=True)
    return DataFrame({"cell_id": cells["cell_id"], "name": cell_names(cells)})
