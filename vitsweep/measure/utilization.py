"""Model FLOPs per second, and how much of the hardware they use."""

from collections.abc import Mapping
from typing import Any

from vitsweep.model.flops import (
    Pooling,
    num_parameters,
    train_flops_of_linears,
)
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.objectives.classification import Classification
from vitsweep.rates.profile import published_peak
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.model_spec import TransformerSpec
from vitsweep.techniques.precision.float8 import Float8

IMAGENET_1K_IMAGES = 1_281_167
"""Training images of ImageNet-1k (ILSVRC 2012)."""


def compute_dtype(cell: CellSpec) -> str:
    """Return the dtype of the matrix products, the row of the peak table to read."""
    plan = cell.precision.plan()
    if cell.precision.float8:
        return "float8"
    if plan.autocast_dtype:
        return plan.autocast_dtype
    return "tf32" if plan.tf32 else plan.param_dtype


def float8_share(cell: CellSpec) -> float:
    """Return which share of the model's FLOPs is multiplied in FP8; 1 where that is no FP8 precision."""
    if not isinstance(cell.precision, Float8) or isinstance(cell.model, ModuleSpec):
        return 1.0
    converted = train_flops_of_linears(*_shape(cell), cell.precision.converts)
    return converted / _flops_and_parameters(cell)[0]


def dtype_beside_float8(cell: CellSpec) -> str:
    """Return the dtype of products that FP8 does not convert; that of all products elsewhere."""
    return "bfloat16" if cell.precision.float8 else compute_dtype(cell)


def attainable(cell: CellSpec, peaks: Mapping[str, float | None]) -> float | None:
    """Return TFLOP/s of a cell whose every product runs at the peak of its dtype; None without peaks.

    Args:
        cell: what runs.
        peaks: dtype -> TFLOP/s.
    """
    share = float8_share(cell)
    main, rest = peaks.get(compute_dtype(cell)), peaks.get(dtype_beside_float8(cell))
    if not main or not rest:
        return None
    return 1 / (share / main + (1 - share) / rest)


def throughput(cell: CellSpec, step_time_ms: float) -> dict[str, float | None]:
    """Return the columns that follow from the step time and the shape."""
    world = cell.resources.world_size
    images_per_second = cell.images_per_step / step_time_ms * 1e3
    flops, parameters = _flops_and_parameters(cell)
    return {
        "images_per_second": images_per_second,
        "images_per_second_per_rank": images_per_second / world,
        "tokens_per_second": images_per_second * cell.objective.tokens_per_image(cell) or None,
        "step_time_ms": step_time_ms,
        "num_parameters": float(parameters),
        "model_flops_per_image": float(flops),
        "model_tflops_per_rank": flops * images_per_second / world / 1e12,
        "epoch_hours_imagenet1k": IMAGENET_1K_IMAGES / images_per_second / 3600,
    }


def utilization(
    cell: CellSpec,
    tflops_per_rank: float | None,
    device_name: str,
) -> tuple[dict[str, float | None], dict[str, Any]]:
    """Return the column of MFU, and where its denominator comes from.

    Args:
        cell: what ran.
        tflops_per_rank: model TFLOP/s of one rank; None where no step was counted.
        device_name: as the driver reports it.
    """
    dtype, beside = compute_dtype(cell), dtype_beside_float8(cell)
    peak, source = published_peak(device_name, dtype)
    peaks = {dtype: peak, beside: published_peak(device_name, beside)[0]}
    peak, share = attainable(cell, peaks), float8_share(cell)
    if share < 1.0:
        source += f", of {share:.1%} of the FLOPs, the others in {beside}"
    is_traced = cell.objective.train_flops(cell) is None
    mfu = tflops_per_rank / peak if tflops_per_rank is not None and peak else None
    return {"mfu": mfu}, {
        "peak_tflops": peak,
        "peak_source": source,
        "compute_dtype": dtype,
        "flops_source": "torch.utils.flop_counter" if is_traced else "formula",
    }


def _flops_and_parameters(cell: CellSpec) -> tuple[int, int]:
    """Return the FLOPs of one image, forward and backward, and the number of parameters."""
    if isinstance(cell.model, ModuleSpec) and isinstance(cell.objective, Classification):
        from vitsweep.model.user_module import counted  # loads torch

        return counted(cell.model, cell.batch.resolution_px)
    flops = cell.objective.train_flops(cell)
    if flops is None:
        from vitsweep.objectives.counted import counted as counted_step

        return counted_step(cell)
    return flops, num_parameters(*_shape(cell))


def _shape(cell: CellSpec) -> tuple[TransformerSpec, int, Pooling]:
    return cell.transformer, cell.batch.resolution_px, cell.classifier.pooling
