"""Arithmetic intensity and rate of each phase of a step, beside what the device can do."""

from dataclasses import dataclass
from math import nan
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.rates.profile import profile_of
from vitsweep.results.record import Status
from vitsweep.spec.measurement import TimeClass
from vitsweep.tables.causes import (
    TRACING,
    UNITS,
    cause_amounts,
    current_records,
    plain_rows,
    rest_note,
    signed,
    traced_pairs,
)
from vitsweep.tables.formatting import Column, missing, number, text_columns, values, with_interval
from vitsweep.tables.names import varying_columns
from vitsweep.tables.stats import mean_interval
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_cells

PHASES = ("forward_ms", "backward_ms", "optimizer_ms")

BYTES = {"float8": 1, "bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4}
"""Compute dtype -> bytes of one element."""

ADAMW_FLOPS = 12
"""Per parameter: decay 2, first moment 3, second moment 4, root, division and update 3."""

COLUMNS = (
    "phase time_ms flops bytes_at_least bytes_from intensity_flop_per_byte tflops_per_rank "
    "compute_dtype limit_tflops limit_source limit_gb_per_s bandwidth_source attainable_tflops "
    "share_of_attainable"
).split()


def roofline(cells: DataFrame) -> DataFrame:
    """Place the phases of every measured cell on the roofline (Williams et al. 2009, CACM 52).

    intensity = FLOPs / bytes moved; attainable = min(matmul rate, intensity x memory bandwidth).
    FLOPs of one rank and step: a third of the model's for forward, two thirds for backward (nothing
    recomputed counts), 12 per parameter for AdamW. Memory traffic is not measured; `bytes_at_least`
    is a lower bound, so the intensity is an upper bound and a point may lie further left:

    * forward: every parameter read once per micro-batch in the compute dtype, every kept activation
      written once;
    * backward: parameters and kept activations read, gradients written;
    * optimizer: gradients read, parameters and optimizer state read and written.

    Args:
        cells: one row per cell. Cells without `num_parameters`, a phase time or a FLOP count have no
            points.

    Returns:
        One row per cell and phase: `cell_id`, what varies, `time_ms` (median instrumented step
        of the slowest rank; backward holds the gradient exchange), `flops` and `bytes_at_least` per rank
        and step, `bytes_from` (`parameters and activations`, or `parameters` where activations were
        not counted), `intensity_flop_per_byte`, `tflops_per_rank`; the limits with their source:
        rates measured on the machine (`mfu_of_measured_peak`, `copy_gb_per_s`) where recorded, else
        published peaks, else empty.

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    names = [
        "num_parameters", "model_flops_per_image", "images_per_step", "world_size", "device",
        "activation_gib", "parameter_gib", "gradient_gib", "optimizer_state_gib", "peak_tflops",
        "model_tflops_per_rank", "mfu_of_measured_peak", *PHASES,
    ]  # fmt: skip
    table = checked_cells(cells, *names)
    measured = table[table["status"] == Status.measured] if len(table) else table
    named = [c for c in varying_columns(table) if c not in COLUMNS]
    rows = [
        {"cell_id": row["cell_id"], **{c: row[c] for c in named}, **_point(row, phase)}
        for _, row in measured.iterrows()
        for phase in PHASES
        if _number(row, phase) > 0 and _number(row, "num_parameters") > 0
    ]
    found = DataFrame(rows, columns=["cell_id", *named, *COLUMNS])
    return found[found["flops"].notna()].reset_index(drop=True)


def _point(row: Series, phase: str) -> dict[str, Any]:
    dtype = "float32" if missing(row.get("compute_dtype")) else str(row["compute_dtype"])
    flops = _flops(row, phase)
    moved, bytes_from = _bytes(row, phase, BYTES.get(dtype, 4))
    seconds = _number(row, phase) / 1000
    peak, peak_source = _matmul_limit(row)
    bandwidth, bandwidth_source = _memory_limit(row)
    intensity, rate = flops / moved if moved > 0 else np.nan, flops / seconds / 1e12
    attainable = min(peak, intensity * bandwidth / 1000) if peak == peak else np.nan
    return {
        "phase": phase.removesuffix("_ms"),
        "time_ms": 1000 * seconds,
        "flops": flops,
        "bytes_at_least": moved,
        "bytes_from": bytes_from,
        "intensity_flop_per_byte": intensity,
        "tflops_per_rank": rate,
        "compute_dtype": dtype,
        "limit_tflops": peak,
        "limit_source": peak_source,
        "limit_gb_per_s": bandwidth,
        "bandwidth_source": bandwidth_source,
        "attainable_tflops": attainable if bandwidth == bandwidth else np.nan,
        "share_of_attainable": rate / attainable if bandwidth == bandwidth else np.nan,
    }


def _flops(row: Series, phase: str) -> float:
    """Return the FLOPs of one rank and step; NaN where they are not known."""
    if phase == "optimizer_ms":
        adamw = str(row.get("optimizer", "")).startswith("adamw")
        return ADAMW_FLOPS * _updated_parameters(row) if adamw else float("nan")
    share = 1 / 3 if phase == "forward_ms" else 2 / 3
    images = _number(row, "images_per_step") / _number(row, "world_size")
    return share * _number(row, "model_flops_per_image") * images


def _updated_parameters(row: Series) -> float:
    """Return how many parameters this rank's optimizer updates: two float32 moments of each."""
    whole, state = _number(row, "num_parameters"), _number(row, "optimizer_state_gib")
    return min(whole, state * 2**30 / 8) if state == state else whole


def _bytes(row: Series, phase: str, per_element: int) -> tuple[float, str]:
    """Return the bytes that one rank moves in a step at least, and what they are made of."""
    if phase == "optimizer_ms":
        parts = [_number(row, f"{p}_gib") for p in ("parameter", "gradient", "optimizer_state")]
        if not np.isnan(parts).any():
            return (2 * parts[0] + parts[1] + 2 * parts[2]) * 2**30, "held tensors"
        return 28 * _updated_parameters(row), "float32 parameters, gradients and two moments"
    degrees = [_number(row, f"mesh.{axis}") for axis in ("tensor", "pipeline")]
    split = float(np.prod([d if d > 1 else 1.0 for d in degrees]))
    parameters = _number(row, "num_parameters") * per_element / split
    micro_batches = max(np.nan_to_num(_number(row, "accumulation_steps"), nan=1.0), 1.0)
    activations = _number(row, "activation_gib") * 2**30
    known = activations == activations
    passes = 1 if phase == "forward_ms" else 2  # backward writes gradients as well
    moved = micro_batches * (passes * parameters + (activations if known else 0.0))
    return moved, "parameters and activations" if known else "parameters"


def _matmul_limit(row: Series) -> tuple[float, str]:
    share, rate = _number(row, "mfu_of_measured_peak"), _number(row, "model_tflops_per_rank")
    if share > 0 and rate > 0:
        return rate / share, "matmul rate measured on this machine"
    peak = _number(row, "peak_tflops")
    source = row.get("peak_source")
    return peak, ("" if missing(source) else str(source)) if peak == peak else ""


def _memory_limit(row: Series) -> tuple[float, str]:
    measured = _number(row, "copy_gb_per_s")
    if measured > 0:
        return measured, "copy rate measured on this machine"
    profile = None if missing(row.get("device")) else profile_of(str(row["device"]))
    bandwidth = profile.figures.memory_tb_s if profile else None
    if bandwidth is None:
        return float("nan"), ""
    return round(1000 * bandwidth.value, 6), f"{bandwidth.source}, {bandwidth.value} TB/s"


def _number(row: Series, column: str) -> float:
    value: Any = row.get(column)
    return float("nan") if missing(value) or isinstance(value, str) else float(value)


# How far a cell's time is from the bound of its FLOPs and bytes, class by class (`vitsweep explain A`).


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
