"""Cast a model to what a PrecisionPlan says."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from vitsweep.model.block import NORMS, become
from vitsweep.model.norm import Float32LayerNorm, HalfLayerNorm
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import PrecisionPlan
from vitsweep.world import allow_tf32


def cast_model(model: nn.Module, plan: PrecisionPlan, *, sharded_masters: bool) -> nn.Module:
    """Cast parameters in place to `plan.param_dtype`, norms to `plan.norm_dtype`.

    Args:
        model: float32 model.
        plan: what the precision means.
        sharded_masters: the sharding keeps float32 shards and casts what it gathers; the model's
            parameters are left alone then.
    """
    norms = [m for m in model.modules() if isinstance(m, NORMS)]
    separate = plan.norm_dtype != plan.param_dtype
    half = plan.norm_dtype in ("bfloat16", "float16")
    if not (sharded_masters and plan.master_weights):
        cast_floating(model, getattr(torch, plan.param_dtype))
        for norm in norms:
            cast_floating(norm, getattr(torch, plan.norm_dtype))
    if half or separate:
        for norm in norms:
            if isinstance(norm, nn.LayerNorm):  # BatchNorm takes half inputs beside float32 weights
                become(norm, HalfLayerNorm if half else Float32LayerNorm)
    return model


def cast_floating(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters and buffers in place; complex ones stay complex.

    `nn.Module.to` would drop the imaginary parts. Complex numbers have no half precision here: they
    are complex128 beside float64, complex64 beside everything else.
    """
    beside = torch.complex128 if dtype == torch.float64 else torch.complex64

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor.to(beside) if tensor.is_complex() else tensor

    # What has no complex numbers may be fake: `to` alone is known to whoever traces a step.
    held = (*module.parameters(), *module.buffers())
    if any(tensor.is_complex() for tensor in held):
        module._apply(cast)
    else:
        module.to(dtype)


def set_process_flags(cell: CellSpec) -> None:
    """Set what torch keeps per process and not per model: TF32, and cuDNN's search for algorithms."""
    allow_tf32(cell.precision.plan().tf32)
    torch.backends.cudnn.benchmark = cell.layout.cudnn_benchmark


def autocast(plan: PrecisionPlan, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the forward pass."""
    if plan.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, plan.autocast_dtype))
