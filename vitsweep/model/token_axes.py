"""Along which axes a model's tokens lie, and which blocks attend along which of them."""

from typing import NamedTuple

from torch import nn

from vitsweep.model.attention import Attention


class TokenAxis(NamedTuple):
    """An axis of the residual stream.

    Attributes:
        axis: its place, from the front.
        length: tokens along it.
    """

    axis: int
    length: int


def token_axes(model: nn.Module) -> tuple[TokenAxis, ...]:
    """Return the axes between which blocks alternate; a plain ViT has one."""
    if hasattr(model, "token_axes"):
        return model.token_axes  # type: ignore[return-value]
    axis = 1 if model.batch_first else 0
    return (TokenAxis(axis, model.num_tokens),)  # type: ignore[arg-type]


def attentions_along(model: nn.Module, axis: int) -> list[Attention]:
    """Return the attention of all blocks that attend along `axis`."""
    return [
        block.attention
        for block in model.blocks  # type: ignore[union-attr]
        if getattr(block, "axis", axis) == axis
    ]
