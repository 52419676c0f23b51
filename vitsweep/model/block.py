"""One pre-norm transformer block, and a sequence of them."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vitsweep.collectives.parallel_linear import (
    Boundary,
    ColumnParallelLinear,
    Replicated,
    RowParallelLinear,
)
from vitsweep.model.attention import Attention
from vitsweep.spec.model_spec import TransformerSpec

# What a model repeats, whatever its kind.


NORMS = (nn.LayerNorm, nn.BatchNorm2d)
"""Modules that `precision.keep_norm_fp32` spares."""

_MARK = "is_repeated_block"

Kind = TypeVar("Kind")


def mark_blocks(modules: Iterable[nn.Module]) -> None:
    """Let modules of a class that is not ours count as blocks."""
    for module in modules:
        setattr(module, _MARK, True)


def is_marked(module: nn.Module) -> bool:
    """Return whether `mark_blocks` was called on a module."""
    return _MARK in vars(module)


class Mlp(nn.Module):
    """Two linears with GELU between them (the exact one, by the error function)."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, mlp_width)
        self.down = nn.Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers to each token, (..., width) to (..., width)."""
        return self.down(F.gelu(self.up(x)))


class SwiGlu(nn.Module):
    """down(silu(gate x) * (up x)) (Shazeer, arXiv:2002.05202); gate and up are one product."""

    def __init__(self, width: int, mlp_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * mlp_width)
        self.down = nn.Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers to each token, (..., width) to (..., width)."""
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention between tokens, then the MLP on each; norms come before, residuals around."""

    def __init__(self, spec: TransformerSpec, *, batch_first: bool) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.attention: nn.Module = Attention(spec.width, spec.num_heads, batch_first=batch_first)
        self.norm_mlp = nn.LayerNorm(spec.width, eps=spec.norm_eps)
        self.mlp: Mlp | SwiGlu = (SwiGlu if spec.mlp == "swiglu" else Mlp)(
            spec.width, spec.mlp_width
        )
        self.scale_attention: nn.Parameter | None = None
        self.scale_mlp: nn.Parameter | None = None
        if spec.layer_scale:
            self.scale_attention = nn.Parameter(torch.full((spec.width,), spec.layer_scale))
            self.scale_mlp = nn.Parameter(torch.full((spec.width,), spec.layer_scale))

    def forward(self, x: Tensor) -> Tensor:
        """Transform the tokens of each image; the shape stays."""
        x = x + self.attend_branch(self.norm_attention(x))
        return x + self.mlp_branch(self.norm_mlp(x))

    def attend_branch(self, normed: Tensor) -> Tensor:
        """Return what attention adds to the residual stream."""
        y = self.attention(normed)
        return y if self.scale_attention is None else y * self.scale_attention

    def mlp_branch(self, normed: Tensor) -> Tensor:
        """Return what the MLP adds to the residual stream."""
        y = self.mlp(normed)
        return y if self.scale_mlp is None else y * self.scale_mlp


class BlockStack(nn.Module):
    """A model that runs its blocks one after the other; so does each stage of a pipeline of it."""

    def transform(self, x: Tensor, blocks: Iterable[nn.Module]) -> Tensor:
        """Run some of the model's blocks; the shape of the tokens stays."""
        for block in blocks:
            x = block(x)
        return x


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a transformer, or those that a model of the user's names."""
    return [m for m in model.modules() if isinstance(m, Block) or is_marked(m)]


def swap_block_class(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """Let the `forward` of `kind` wrap that of every block of `model`."""
    for block in blocks_of(model):
        become(block, kind)
    return model


def become(module: Any, kind: type[Kind]) -> Kind:
    """Let a module be an instance of `kind` too, whose methods come before those of its own class.

    It stays the same object with the same parameters, names and hooks.
    """
    module.__class__ = _subclass(kind, type(module))  # type: ignore[arg-type]
    return cast(Kind, module)


@cache
def _subclass(kind: Any, own: type) -> Any:
    """Return a subclass of both, one for all modules of a class: they share one compilation."""
    if issubclass(kind, own):
        return kind
    return type(f"{kind.__name__}Of{own.__name__}", (kind, own), {})


# Blocks whose matrices are split over ranks: heads of attention, hidden units of the MLP.


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


def split_replicated(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Split every block over the ranks of a group, all of which have all tokens outside."""
    boundary = Replicated(group)
    return split_blocks(model, lambda block: boundary)


def _split(block: Block, boundary: Boundary) -> None:
    attention: nn.Module = block.attention
    # q, k and v are fused: each is cut by heads for itself.
    become(attention.qkv, ColumnParallelLinear).take(boundary, parts=3)
    become(attention.out, RowParallelLinear).take(boundary)
    # So are gate and up of SwiGLU.
    num_fused = 2 if isinstance(block.mlp, SwiGlu) else 1
    become(block.mlp.up, ColumnParallelLinear).take(boundary, parts=num_fused)
    become(block.mlp.down, RowParallelLinear).take(boundary)
    attention.num_heads //= boundary.group.size()  # type: ignore[operator, assignment]
