"""The step time of a cell: its trace, the rates of the machine it would run on, and what records taught."""

from dataclasses import replace
from functools import cache
from importlib.metadata import version

from vitsweep.measure.device_name import device_name
from vitsweep.predict.calibration import load_calibration
from vitsweep.predict.hardware import generic_gpu, hardware_named, hardware_of_device
from vitsweep.predict.rates import Rates
from vitsweep.predict.residuals import NO_RESIDUALS, ResidualModel
from vitsweep.predict.step_time import StepTimePrediction, predict_step
from vitsweep.predict.step_trace import StepTrace
from vitsweep.predict.table_rates import TableRates
from vitsweep.predict.uncalibrated_cpu import UncalibratedCpuRates
from vitsweep.spec.cell_spec import CellSpec

DECODE_MS = 2.0
"""Decoding and resizing one JPEG of 500 x 375 pixels: 0.62 + 1.40 ms with Pillow 13 on one core of a
Xeon."""


def predict_cell(
    cell: CellSpec,
    trace: StepTrace,
    hardware: str | None = None,
    residuals: ResidualModel = NO_RESIDUALS,
) -> StepTimePrediction:
    """Predict the step time of a cell.

    Args:
        cell: the cell; its number of ranks per node says what shares a node.
        trace: of its busiest rank.
        hardware: name of a device or path of a profile file; None for this machine.
        residuals: of this machine's earlier records.

    Raises:
        BadValueError: the hardware is unknown.
    """
    rates, notice = rates_for(cell, hardware)
    found = predict_step(
        trace,
        rates,
        tf32=cell.precision.plan().tf32,
        captured=cell.compilation.scope == "model" and not cell.compilation.fuses_kernels,
        input_ms=_input_ms(cell),
        settings=settings_of(cell),
        residuals=residuals,
    )
    return replace(found, notes=(*found.notes, notice)) if notice else found


def rates_for(cell: CellSpec, hardware: str | None = None) -> tuple[Rates, str]:
    """Return (rates, notice or ""): of a named device, else this machine's calibration or profile.

    Raises:
        BadValueError: the hardware is unknown.
    """
    if hardware is not None:
        return TableRates(hardware_named(hardware)), ""
    return _rates_here(cell)


def settings_of(cell: CellSpec) -> dict[str, str]:
    """Return group -> choice, and the model: by what `residuals` tells records apart."""
    chosen = {group: technique.name for group, technique in cell.techniques.items()}
    return {"model": cell.model.name, "ranks": str(cell.resources.world_size), **chosen}


def _rates_here(cell: CellSpec) -> tuple[Rates, str]:
    device = _device_here(cell.resources.device)
    if device is None:
        return TableRates(generic_gpu()), "The device is unknown: name one by `--hardware`."
    calibration, notice = load_calibration(device, version("torch"))
    if calibration:
        return calibration.rates_for(cell), notice
    if cell.resources.device == "cpu":
        return UncalibratedCpuRates(cell.resources), notice
    profile = hardware_of_device(device)
    if profile:
        return TableRates(profile), notice
    return TableRates(generic_gpu()), f"No profile of {device} is known. {notice}"


@cache
def _device_here(device: str) -> str | None:
    return device_name(device)


def _input_ms(cell: CellSpec) -> float:
    """Time in which the workers of one rank prepare the images of a step; 0 where they are in memory."""
    workers = getattr(cell.data, "num_workers", None)
    if workers is None:
        return 0.0
    images = cell.micro_batch * cell.batch.accumulation_steps
    return images * DECODE_MS / max(1, workers)
