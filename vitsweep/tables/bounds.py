"""How far a cell's time is from the bound of its FLOPs and bytes, class by class (`vitsweep explain A`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, ClassVar

import numpy as np
from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.spec.measurement import TimeClass
from vitsweep.tables.causes import (
    REST,
    TRACING,
    UNITS,
    TracedRun,
    added_by_tracing,
    current_records,
    plain_rows,
    rest_note,
    signed,
    traced_pairs,
)
from vitsweep.tables.formatting import Column, number, text_columns, values, with_interval
from vitsweep.tables.roofline import roofline
from vitsweep.tables.stats import mean_interval
from vitsweep.tables.sweep_tables import SweepTables

MOST_NAMED = 3
"""Classes that the sentence names."""


@dataclass(frozen=True, eq=False)
class Bounds:
    """How far a cell's time is from the bound of its FLOPs and bytes.

    Attributes:
        name: of the cell.
        step_ms: over the untraced windows.
        num_blocks: blocks that traced it.
        causes: one row per class, `tracing itself` and `rest` last: `cause, ms, low, high`, `bound_ms`, the
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
    def sentence(self) -> str:
        """The answer in one sentence."""
        head = f"{self.name} takes {number(self.step_ms)} ms a step"
        if not self.rates:
            return (
                f"{head}; its runs recorded no rate of matrix products or of memory of this device, so "
                "nothing is said of a bound."
            )
        known = self.causes.dropna(subset="bound_ms")
        largest = known[known["gap_ms"] > 0].sort_values("gap_ms", ascending=False)
        parts = [
            f"{row['cause']} {number(row['ms'])} ms, at least {number(row['bound_ms'])}"
            for row in largest.head(MOST_NAMED).to_dict("records")
        ]
        least = known["bound_ms"].sum()
        return f"{head}; its FLOPs and bytes take at least {number(least)} ms: {'; '.join(parts)}."

    names: ClassVar[tuple[str, ...]] = ()
    """Columns of `texts` are named after no cell."""

    def texts(self, operators: int = 0, modules: bool = False) -> dict[str, DataFrame]:
        """Return the table that terminal and report show; traces of one cell have no others."""
        return {"Where the time goes": bound_text(self)}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know beside the table."""
        rest = tuple(rest_note(self.causes, self.step_ms))
        if not self.rates:
            return rest
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
    runs = [a for a, _ in traced_pairs(current_records(tables), cell_id, cell_id)]
    if not runs:
        raise VitsweepError(f"No run of {name} has traced steps.")
    points = roofline(tables.cells)
    points = points[points["cell_id"] == cell_id].set_index("phase")
    rates, least = _rates(points), _bounds(runs, points)
    kinds = [str(kind) for kind in TimeClass if any(run.ms.get(kind) for run in runs)]
    spent = {kind: [run.ms.get(kind, 0.0) for run in runs] for kind in kinds}
    spent[TRACING] = [-added_by_tracing(run) for run in runs]
    spent[REST] = [run.step_ms - run.plain_ms for run in runs]
    rows = []
    for cause, each in spent.items():
        ms, low, high = mean_interval(np.array(each, float))
        bound = least.get(cause, nan) if rates else nan
        rows.append(
            {"cause": cause, "ms": ms, "low": low, "high": high}
            | {"bound_ms": bound, "gap_ms": ms - bound}
        )
    step_ms = float(np.mean([run.step_ms for run in runs]))
    return Bounds(name, step_ms, len(runs), DataFrame(rows), rates)


def _rates(points: DataFrame) -> str:
    """Return the rates that bound a cell with their sources; "" where one of them is unknown."""
    known = points[["limit_tflops", "limit_gb_per_s"]].dropna()
    if known.empty:
        return ""
    first = points.loc[known.index[0]]
    gflops = number(1e3 * first["limit_tflops"])
    return (
        f"{gflops} GFLOP/s in {first['compute_dtype']} ({first['limit_source']}), "
        f"{number(first['limit_gb_per_s'])} GB/s ({first['bandwidth_source']})"
    )


def _bounds(runs: Sequence[TracedRun], points: DataFrame) -> dict[str, float]:
    """Return class -> the milliseconds that its counted work takes at least."""
    if points.empty:
        return {}
    flops_per_ms = 1e9 * float(points["limit_tflops"].iloc[0])
    bytes_per_ms = 1e6 * float(points["limit_gb_per_s"].iloc[0])
    found = {}
    for kind, unit in UNITS.items():
        work = float(np.mean([run.work.get(kind, 0.0) for run in runs]))
        if work > 0:
            found[str(kind)] = work / (flops_per_ms if unit == "GFLOP/s" else bytes_per_ms)
    if "optimizer" in points.index:
        held = float(points.at["optimizer", "bytes_at_least"])  # type: ignore[arg-type]
        found[str(TimeClass.optimizer)] = held / bytes_per_ms
    return found


def traced_cells(tables: SweepTables) -> list[str]:
    """Return the ids of the cells that have traced steps."""
    traced = {record.cell_id for record in current_records(tables) if "trace" in record.samples}
    return [cell_id for cell_id in tables.cells["cell_id"] if cell_id in traced]


def bound_text(found: Bounds) -> DataFrame:
    """Return the table that the terminal shows."""
    columns: dict[str, Column] = {
        "cause": values("cause"),
        "ms a step": with_interval("ms", number, number, "{}"),
        "at least": values("bound_ms", number),
        "gap": values("gap_ms", lambda gap: "" if gap != gap else signed(gap)),
    }
    return text_columns(found.causes, columns)
