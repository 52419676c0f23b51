"""The roofline of one cell: the rate of each phase of a step, next to what its device can do."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.bars import Bars
from vitsweep.errors import VitsweepError
from vitsweep.rates.profile import profile_of
from vitsweep.results.record import Status
from vitsweep.tables.formatting import (
    Column,
    missing,
    number,
    percent,
    plain,
    text_columns,
    values,
)
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import Claim

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


@dataclass(frozen=True, eq=False)
class CellRoofline:
    """The phases of one cell on the roofline (Williams et al. 2009, CACM 52).

    intensity = FLOPs / bytes moved; attainable = min(published peak, intensity x memory bandwidth).
    FLOPs of one rank and step: a third of the model's for forward, two thirds for backward (nothing
    recomputed counts), 12 per parameter for AdamW. Memory traffic is not measured; `bytes_at_least`
    is a lower bound, so the intensity is an upper bound:

    * forward: every parameter read once per micro-batch in the compute dtype, every kept activation
      written once;
    * backward: parameters and kept activations read, gradients written;
    * optimizer: gradients read, parameters and optimizer state read and written.

    Attributes:
        name: of the cell.
        causes: a row per phase: `phase`, `time_ms` (median instrumented step of the slowest rank; backward
            holds the gradient exchange), `flops` and `bytes_at_least` per rank and step, `bytes_from`
            (`parameters and activations`, or `parameters` where activations were not counted),
            `intensity_flop_per_byte`, `tflops_per_rank`, and the published limits with their source, empty
            where none is known.
    """

    name: str
    causes: DataFrame

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        known = self.causes.dropna(subset=["share_of_attainable"])
        parts = [
            f"{percent(row['share_of_attainable'])} in {row['phase']}"
            for _, row in known.iterrows()
        ]
        return say("roofline", name=self.name, phases=", ".join(parts)) if parts else ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the limits are from, and which are not known."""
        first, told = self.causes.iloc[0], []
        for column, source, name in (
            ("limit_tflops", "limit_source", "matmul rate"),
            ("limit_gb_per_s", "bandwidth_source", "memory bandwidth"),
        ):
            known = first[source] or f"the {name} of the record"
            told.append(f"no {name} is known" if missing(first[column]) else known)
        return (say("roofs", limits="; ".join(told)),)

    @property
    def figure(self) -> Figure:
        """The rate of each phase as a bar, next to it the attainable one as a hollow mark."""
        bars = Bars(
            column="tflops_per_rank", label="Rate per rank (TFLOP/s)",
            mark="attainable_tflops", marked="attainable, at most",
            note=lambda row: percent(row["share_of_attainable"]),
            colour=lambda row: style.PHASES[f"{row['phase']}_ms"],
        )  # fmt: skip
        return bars.draw(self.causes, self.causes["phase"].tolist())

    def texts(self, operators: int = 0) -> dict[str, DataFrame]:
        """Return the table that the terminal shows."""
        columns: dict[str, Column] = {
            "phase": values("phase"),
            "ms": values("time_ms", number),
            "GFLOP": values("flops", lambda flops: number(flops / 1e9)),
            "MB, at least": values("bytes_at_least", lambda moved: number(moved / 1e6)),
            "TFLOP/s": values("tflops_per_rank", number),
            "attainable, at most": values("attainable_tflops", number),
            "share, at least": values("share_of_attainable", percent),
        }
        return {"Roofline": text_columns(self.causes, columns)}

    def json(self) -> dict[str, Any]:
        """Return it as plain values for `--json`."""
        return {"a": self.name, "phases": plain_rows(self.causes[[*COLUMNS]])}


def cell_roofline(name: str, cell: Series) -> CellRoofline:
    """Place the phases of a cell on the roofline.

    Args:
        name: of the cell.
        cell: its row of a table of cells.

    Raises:
        VitsweepError: no phase was measured, or no FLOPs or parameters were counted.
    """
    is_known = cell["status"] == Status.measured and _number(cell, "num_parameters") > 0
    found = [_point(cell, p) for p in PHASES if is_known and _number(cell, p) > 0]
    rows = DataFrame(found, columns=COLUMNS).dropna(subset=["flops"])
    if rows.empty:
        why = ", being only screened" if cell["claim"] == Claim.screened else ""
        raise VitsweepError(
            f"No phase of {name} was measured with its FLOPs{why}: it has no roofline."
        )
    return CellRoofline(name, rows.reset_index(drop=True))


def _point(row: Series, phase: str) -> dict[str, Any]:
    dtype = plain(row.get("compute_dtype")) or "float32"
    flops = _flops(row, phase)
    moved, bytes_from = _bytes(row, phase, BYTES.get(dtype, 4))
    seconds = _number(row, phase) / 1000
    profile = profile_of(plain(row.get("device")))
    known = profile.figures.memory_tb_s if profile else None
    peak, bandwidth = _number(row, "peak_tflops"), 1000 * known.value if known else np.nan
    intensity, rate = flops / moved if moved > 0 else np.nan, flops / seconds / 1e12
    attainable = float(np.minimum(peak, intensity * bandwidth / 1000))  # NaN: one is unknown
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
        "limit_source": plain(row.get("peak_source")),
        "limit_gb_per_s": bandwidth,
        "bandwidth_source": f"{known.source}, {known.value} TB/s" if known else "",
        "attainable_tflops": attainable,
        "share_of_attainable": rate / attainable,
    }


def _flops(row: Series, phase: str) -> float:
    """Return the FLOPs of one rank and step; NaN where they are not known."""
    if phase == "optimizer_ms":
        adamw = plain(row.get("optimizer")).startswith("adamw")
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


def _number(row: Series, column: str) -> float:
    value: Any = row.get(column)
    return float("nan") if missing(value) or isinstance(value, str) else float(value)


def plain_rows(table: DataFrame) -> list[dict[Any, Any]]:
    """Return the rows of a table as plain values for JSON."""
    return table.astype(object).where(table.notna(), None).to_dict("records")
