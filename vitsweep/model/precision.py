"""A model cast to what a PrecisionPlan says, and LayerNorm with gradients summed in float32."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitsweep.model.block import NORMS, become
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import PrecisionPlan
from vitsweep.world import allow_tf32


def layer_norm(
    input: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`F.layer_norm` whose weight and bias get gradients summed in float32 on every device.

    torch's CPU kernel sums them in the dtype of the parameters: in bfloat16 a sum over 12,544 rows
    (64 images of 196 tokens) stands still once it is 256 times its terms, and ends 84 % off (torch
    2.11 and 2.13). Its sums for Linear, Conv2d and BatchNorm are right to the last digit. Summing
    outside of that kernel also takes no longer: 15 ms instead of 21 for these rows of 192.

    Args:
        input: (..., *shape).
        shape: of the axes that are normalised together, the last ones.
        weight: `shape`; None for none.
        bias: `shape`; None for none.
        eps: added to the variance.
    """
    if (
        weight is not None
        and weight.device.type == "cpu"
        and weight.dtype in (torch.bfloat16, torch.float16)
    ):
        return _SummedInFloat32.apply(input, shape, weight, bias, eps)
    return F.layer_norm(input, shape, weight, bias, eps)


class _SummedInFloat32(torch.autograd.Function):
    """torch's kernels for output and input gradient; sums for the parameters outside of them."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        shape: tuple[int, ...],
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        output, mean, inverse_std = torch.native_layer_norm(input, shape, weight, bias, eps)
        ctx.save_for_backward(input, mean, inverse_std, weight, bias)
        ctx.shape, ctx.eps = shape, eps
        return output

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        input, mean, inverse_std, weight, bias = ctx.saved_tensors
        of_input, _, _ = torch.ops.aten.native_layer_norm_backward(
            upstream, input, ctx.shape, mean, inverse_std, weight, bias, [True, False, False]
        )
        rows = tuple(range(input.ndim - len(ctx.shape)))
        normed = F.layer_norm(input, ctx.shape, eps=ctx.eps)
        of_weight = normed.mul_(upstream).sum(rows)  # torch's sum is wide inside
        of_bias = None if bias is None else upstream.sum(rows)
        return of_input, None, of_weight, of_bias, None


class HalfLayerNorm(nn.LayerNorm):
    """LayerNorm with half-precision parameters."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last axis of (..., width); shape and dtype stay."""
        return layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class Float32LayerNorm(nn.LayerNorm):
    """LayerNorm that computes in float32 and returns the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last axis of (..., width); shape and dtype stay."""
        wide = input.float()
        normed = F.layer_norm(wide, self.normalized_shape, self.weight, self.bias, self.eps)
        return normed.to(input.dtype)


class InFloat32(nn.Module):
    """Before a class that normalises in its own way, such as over channels that come first."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute in float32; return the dtype of the input."""
        found: Tensor = super().forward(input.float())
        return found.to(input.dtype)


class TokenShardedNorm(nn.LayerNorm):
    """LayerNorm on own tokens, whose parameters get the part of their gradient that these give."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last axis, in the dtype of the parameters."""
        wide = input.to(self.weight.dtype)
        normed = layer_norm(wide, self.normalized_shape, self.weight, self.bias, self.eps)
        return normed.to(input.dtype)


# Cast a model to what a PrecisionPlan says.


def cast_model(model: nn.Module, plan: PrecisionPlan, *, sharded_masters: bool) -> nn.Module:
    """Cast parameters in place to `plan.param_dtype`, norms to `plan.norm_dtype`.

    Args:
        model: float32 model.
        plan: what the precision means.
        sharded_masters: the sharding keeps float32 shards and casts what it gathers; the model's
            parameters are left alone then, and its buffers are cast as without it.
    """
    norms = [m for m in model.modules() if isinstance(m, NORMS)]
    separate = plan.norm_dtype != plan.param_dtype
    half = plan.norm_dtype in ("bfloat16", "float16")
    cast = cast_buffers if sharded_masters and plan.master_weights else cast_floating
    cast(model, getattr(torch, plan.param_dtype))
    for norm in norms:
        cast(norm, getattr(torch, plan.norm_dtype))
    if half or separate:
        for norm in norms:
            if not isinstance(norm, nn.LayerNorm):
                continue  # BatchNorm takes half inputs with float32 weights
            if type(norm).forward is nn.LayerNorm.forward:
                become(norm, HalfLayerNorm if half else Float32LayerNorm)
            elif not half:
                become(norm, InFloat32)
    return model


def cast_floating(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters and buffers in place; complex ones stay complex.

    `nn.Module.to` would drop the imaginary parts. Complex numbers have no half precision here: they
    are complex128 with float64, complex64 with everything else.
    """
    beside = torch.complex128 if dtype == torch.float64 else torch.complex64

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor.to(beside) if tensor.is_complex() else tensor

    module._apply(cast)


def cast_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point buffers in place."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)


def set_process_flags(cell: CellSpec) -> None:
    """Set what torch keeps per process and not per model: TF32, and cuDNN's search for algorithms."""
    allow_tf32(cell.precision.plan().tf32)
    torch.backends.cudnn.benchmark = cell.layout.cudnn_benchmark


def autocast(plan: PrecisionPlan, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the forward pass."""
    if plan.autocast_dtype is None:
        return nullcontext()
    return torch.autocast(device.type, getattr(torch, plan.autocast_dtype))
