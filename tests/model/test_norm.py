"""LayerNorm in half precision learns as in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vitsweep.model.precision import layer_norm

ROWS, WIDTH = 12_544, 32
"""64 images of 196 tokens: what a ViT with 16 x 16 patches sums at 224 pixels."""


def gradients(norm, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    upstream = (torch.randn(64, 1, WIDTH) / 196).expand(64, 196, WIDTH).reshape(ROWS, WIDTH)
    leaves = [t.to(dtype).requires_grad_() for t in (x, torch.ones(WIDTH), torch.zeros(WIDTH))]
    norm(leaves[0], (WIDTH,), leaves[1], leaves[2], 1e-6).backward(upstream.to(dtype))
    return tuple(leaf.grad.double() for leaf in leaves)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision_are_right_to_its_last_digits(half: torch.dtype) -> None:
    wanted = gradients(F.layer_norm, torch.float64)
    for got, exact in zip(gradients(layer_norm, half), wanted, strict=True):
        assert (got - exact).abs().max() < 0.02 * exact.abs().max()


def test_full_precision_is_the_kernel_of_torch() -> None:
    wanted = gradients(F.layer_norm, torch.float32)
    for got, exact in zip(gradients(layer_norm, torch.float32), wanted, strict=True):
        assert torch.equal(got, exact)
