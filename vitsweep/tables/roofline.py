"""Arithmetic intensity and rate of each phase of a step, beside what the device can do."""

from typing import Any

import numpy as np
from pandas import DataFrame, Series

from vitsweep.rates.profile import profile_of
from vitsweep.results.record import Status
from vitsweep.tables.formatting import missing
from vitsweep.tables.names import varying_columns
from vitsweep.tables.sentences import say
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
        return 28 * _updated_parameters(row), "parameters, gradients, moments"
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
        return rate / share, "measured matmul rate"
    peak = _number(row, "peak_tflops")
    source = row.get("peak_source")
    return peak, ("" if missing(source) else str(source)) if peak == peak else ""


def _memory_limit(row: Series) -> tuple[float, str]:
    measured = _number(row, "copy_gb_per_s")
    if measured > 0:
        return measured, "measured copy rate"
    profile = None if missing(row.get("device")) else profile_of(str(row["device"]))
    bandwidth = profile.figures.memory_tb_s if profile else None
    if bandwidth is None:
        return float("nan"), ""
    return round(1000 * bandwidth.value, 6), f"{bandwidth.source}, {bandwidth.value} TB/s"


def _number(row: Series, column: str) -> float:
    value: Any = row.get(column)
    return float("nan") if missing(value) or isinstance(value, str) else float(value)


def roofs(points: DataFrame) -> str:
    """Return where the limits of a roofline are from, and which are not known."""
    told = []
    for column, source, name in (
        ("limit_tflops", "limit_source", "matmul rate"),
        ("limit_gb_per_s", "bandwidth_source", "memory bandwidth"),
    ):
        known = ", ".join(s for s in dict.fromkeys(points[source]) if s)
        told.append(known if points[column].notna().any() else f"no {name} is known")
    return say("roofs", limits="; ".join(told))
