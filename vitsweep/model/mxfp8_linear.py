"""MXFP8 products of a linear (OCP Microscaling Formats 1.0), by torchao."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear, mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

E4M3 = torch.float8_e4m3fn
BLOCK = 32
"""Numbers that share a scale, 2 to the power ceil(log2(largest / 448))."""


class Mxfp8Linear(MXFP8Linear):
    """A linear whose three products have operands in MXFP8.

    torchao's own does not follow autocast, and takes a CUDA kernel for the weight's gradient where it
    emulates as well.
    """

    kernels: ClassVar[tuple[Any, ...]] = (
        KernelPreference.AUTO,
        MXFP8Dim0CastKernelChoice.TRITON,
        MXFP8Dim1CastKernelChoice.CUDA,
    )

    def forward(self, input: Tensor) -> Tensor:
        """Return outputs (..., out_features) of inputs (..., in_features), in the dtype of autocast."""
        device, kind = input.device.type, self.weight.dtype
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
        operands = input.to(kind), self.weight.to(kind)
        formats = (E4M3, E4M3, E4M3, BLOCK)
        with torch.autocast(device, enabled=False):
            output: Tensor = mx_mm.apply(
                *operands, *formats, *self.kernels, ScaleCalculationMode.RCEIL, False
            )
            return output if self.bias is None else output + self.bias.to(kind)


class EmulatedMxfp8Linear(Mxfp8Linear):
    """The same products in the dtype of the inputs, of operands that were rounded to MXFP8."""

    kernels = (
        KernelPreference.EMULATED,
        MXFP8Dim0CastKernelChoice.TORCH,
        MXFP8Dim1CastKernelChoice.TORCH,
    )
