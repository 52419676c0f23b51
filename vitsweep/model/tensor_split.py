"""Blocks whose matrices are split over ranks: heads of attention, hidden units of the MLP."""

from collections.abc import Callable

from torch import nn

from vitsweep.collectives.parallel_linear import Boundary, ColumnParallelLinear, RowParallelLinear
from vitsweep.model.block import Block, SwiGlu


def split_blocks(model: nn.Module, boundary_of: Callable[[nn.Module], Boundary]) -> nn.Module:
    """Keep this rank's heads and hidden units in every block.

    Args:
        model: whole, the same on every rank.
        boundary_of: block of `model.blocks` -> what lies outside its pairs of matrices.
    """
    for outer in model.blocks:  # type: ignore[union-attr]
        boundary = boundary_of(outer)
        for block in outer.modules():
            if isinstance(block, Block):
                _split(block, boundary)
    return model


def _split(block: Block, boundary: Boundary) -> None:
    attention: nn.Module = block.attention
    # q, k and v are fused: each is cut by heads for itself.
    ColumnParallelLinear.take(attention.qkv, boundary, parts=3)  # type: ignore[arg-type]
    RowParallelLinear.take(attention.out, boundary)  # type: ignore[arg-type]
    # So are gate and up of SwiGLU.
    ColumnParallelLinear.take(
        block.mlp.up, boundary, parts=2 if isinstance(block.mlp, SwiGlu) else 1
    )
    RowParallelLinear.take(block.mlp.down, boundary)
    attention.num_heads //= boundary.group.size()  # type: ignore[operator, assignment]
