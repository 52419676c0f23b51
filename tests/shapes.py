"""A small model, its images, and what one step of it gives."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitsweep.model.initialize import plain_name
from vitsweep.model.vit import ViT
from vitsweep.spec.model_spec import ViTSpec

__all__ = ["CASES", "NANO", "assert_equal_step", "build", "replace", "step"]

NANO = ViTSpec(
    name="nano",
    depth=2,
    width=32,
    num_heads=2,
    mlp_width=64,
    mlp="gelu",
    layer_scale=None,
    patch_px=2,
    in_channels=3,
    num_classes=5,
    head="classify",
    norm_eps=1e-6,
    registers=0,
    position="learned",
)
CASES = {
    "token": {"pooling": "token"},
    "mean": {"pooling": "mean"},
    "token_batch_second": {"pooling": "token", "batch_first": False},
    "mean_batch_second": {"pooling": "mean", "batch_first": False},
}


def build(spec: ViTSpec = NANO, dtype: torch.dtype = torch.float64, **kwargs: Any) -> ViT:
    """The model with the weights of seed 0, the same for every layout."""
    torch.manual_seed(0)
    return ViT(spec, resolution_px=8, **({"pooling": "token"} | kwargs)).to(dtype)


def step(model: nn.Module, spec: ViTSpec = NANO) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients by plain name of one forward and backward pass over fixed images."""
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    output = model(torch.randn(3, spec.in_channels, 8, 8, dtype=dtype))
    output.square().sum().backward()
    return output.detach(), {plain_name(n): p.grad for n, p in model.named_parameters()}


def assert_equal_step(apply: Callable[[nn.Module], nn.Module], **kwargs: Any) -> None:
    """`apply` leaves output and every gradient of the plain model as they are, in float64."""
    plain, plain_gradients = step(build(**kwargs))
    output, gradients = step(apply(build(**kwargs)))
    torch.testing.assert_close(output, plain, rtol=1e-12, atol=1e-12)
    assert gradients.keys() == plain_gradients.keys()
    for name, expected in plain_gradients.items():
        torch.testing.assert_close(gradients[name], expected, rtol=1e-10, atol=1e-12, msg=name)
