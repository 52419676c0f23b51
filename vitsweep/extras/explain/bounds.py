"""How far a cell's time is from the bound of its FLOPs and bytes, class by class (`vitsweep explain A`)."""

from dataclasses import dataclass
from math import nan
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.extras.explain.causes import (
    TRACING,
    UNITS,
    cause_amounts,
    current_records,
    plain_rows,
    rest_note,
    signed,
    traced_pairs,
)
from vitsweep.spec.measurement import TimeClass
from vitsweep.tables.formatting import Column, number, text_columns, values, with_interval
from vitsweep.tables.roofline import roofline
from vitsweep.tables.stats import mean_interval
from vitsweep.tables.sweep_tables import SweepTables

TAKEN_OFF = f"{TRACING}, taken off"
"""The row that takes back what the profiler adds to the classes, which are of traced steps."""
MOST_NAMED = 3
"""Classes that the sentence names."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """How far a cell's time is from the bound of its FLOPs and bytes.

    Attributes:
        name: of the cell.
        step_ms: over the untraced windows.
        num_blocks: blocks that traced it.
        causes: one row per class, `TAKEN_OFF` and `rest` last: `cause, ms, low, high`, `bound_ms`, the
            shortest time in which the device can do the counted work, and `gap_ms`. `ms` adds up to
            `step_ms`. The bound is NaN where no work is counted or the rate of the device is unknown.
        rates: the rates of the device and where they are from; "" where one is unknown.
    """

    name: str
    step_ms: float
    num_blocks: int
    causes: DataFrame
    rates: str

    @property
    def least_ms(self) -> float:
        """The shortest time for all counted work; NaN where none is known."""
        return float(self.causes["bound_ms"].sum(min_count=1))

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        head = f"{self.name} takes {number(self.step_ms)} ms a step"
        if not self.rates:
            return (
                f"{head}; its runs recorded no rate of matrix products or of memory of this device, so "
                "nothing is said of a bound."
            )
        largest = self.causes[self.causes["gap_ms"] > 0].sort_values("gap_ms", ascending=False)
        parts = [
            f"{row['cause']} {number(row['ms'])} ms, at least {number(row['bound_ms'])}"
            for row in largest.head(MOST_NAMED).to_dict("records")
        ]
        return f"{head}; its FLOPs and bytes take at least {number(self.least_ms)} ms: {'; '.join(parts)}."

    names: ClassVar[tuple[str, ...]] = ()
    """Columns of `texts` are named after no cell."""

    def texts(self, operators: int = 0, modules: bool = False) -> dict[str, DataFrame]:
        """Return the table that terminal and report show; traces of one cell have no others."""
        return {"Where the time goes": bound_text(self)}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know beside the table."""
        rest = rest_note(self.causes, self.step_ms)
        if not self.rates:
            return tuple(rest)
        faster = self.causes[self.causes["gap_ms"] < 0]["cause"].tolist()
        cached = f" Caches serve {', '.join(faster)} faster than memory does." if faster else ""
        return (f"Rates: {self.rates}.{cached}", *rest)

    def json(self) -> dict[str, Any]:
        """Return it as plain values for `--json`."""
        return {
            "a": self.name,
            "step_ms": self.step_ms,
            "blocks": self.num_blocks,
            "causes": plain_rows(self.causes),
            "rates": self.rates,
            "notes": list(self.notes),
        }


def bounds(tables: SweepTables, cell_id: str, name: str) -> Bounds:
    """Return how far the classes of a cell's traced steps are from the bounds of their work.

    Raises:
        VitsweepError: no run of the cell has traced steps.
    """
    pairs = traced_pairs(current_records(tables), cell_id, cell_id)
    if not pairs:
        raise VitsweepError(f"No run of {name} has traced steps.")
    points = roofline(tables.cells).dropna(subset=["limit_tflops", "limit_gb_per_s"])
    points = points[points["cell_id"] == cell_id].set_index("phase")
    rates, work_per_ms = "", {}
    if len(points):
        first = points.iloc[0]
        flops, bandwidth = 1e3 * first["limit_tflops"], first["limit_gb_per_s"]
        work_per_ms = {"GFLOP/s": 1e6 * flops, "GB/s": 1e6 * bandwidth}
        rates = (
            f"{number(flops)} GFLOP/s in {first['compute_dtype']} ({first['limit_source']}), "
            f"{number(bandwidth)} GB/s ({first['bandwidth_source']})"
        )
    rows = []
    for cause, found in cause_amounts(pairs).items():
        ms, low, high = mean_interval(found[:, 0, 0])
        work, unit = float(found[:, 0, 2].mean()), UNITS.get(cause)  # type: ignore[call-overload]
        if cause == TimeClass.optimizer and "optimizer" in points.index:
            work, unit = float(points.at["optimizer", "bytes_at_least"]), "GB/s"  # type: ignore[arg-type]
        bound = work / work_per_ms[unit] if unit in work_per_ms and work > 0 else nan
        row = {
            "cause": TAKEN_OFF if cause == TRACING else cause,
            "ms": ms,
            "low": low,
            "high": high,
        }
        rows.append(row | {"bound_ms": bound, "gap_ms": ms - bound})
    step_ms = float(np.mean([run.step_ms for run, _ in pairs]))
    return Bounds(name, step_ms, len(pairs), DataFrame(rows), rates)


def traced_cells(tables: SweepTables) -> list[str]:
    """Return the ids of the cells that have traced steps."""
    traced = {record.cell_id for record in current_records(tables) if "trace" in record.samples}
    return [cell_id for cell_id in tables.cells["cell_id"] if cell_id in traced]


def bound_text(found: Bounds) -> DataFrame:
    """Return the table that the terminal shows, the measured step last."""
    step, least = found.step_ms, found.least_ms
    total = {"cause": "measured step", "ms": step, "bound_ms": least, "gap_ms": step - least}
    columns: dict[str, Column] = {
        "cause": values("cause"),
        "ms a step": with_interval("ms", number, number, "{}"),
        "at least": values("bound_ms", number),
        "gap": values("gap_ms", signed),
    }
    return text_columns(pd.concat([found.causes, DataFrame([total])]), columns)
