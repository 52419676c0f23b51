"""One pre-norm transformer block, stacks of them, and the network around these."""

from collections.abc import Callable, Iterable, Mapping
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
from vitsweep.model.attention import Attention, TokenAxis
from vitsweep.spec.model_spec import TransformerSpec

# What a model repeats, whatever its kind.


NORMS = (nn.LayerNorm, nn.BatchNorm2d)
"""Modules that `precision.keep_norm_fp32` spares."""

_MARK = "is_repeated_block"

Kind = TypeVar("Kind")

Context = dict[str, Tensor]
"""What blocks read besides tokens, by name; a `dict`, which the pytrees of FSDP2 and Dynamo know."""


def mark_blocks(modules: Iterable[nn.Module]) -> None:
    """Let modules of a class that is not ours count as blocks."""
    for module in modules:
        setattr(module, _MARK, True)


def is_marked(module: nn.Module) -> bool:
    """Return whether `mark_blocks` was called on a module."""
    return _MARK in vars(module)


class Mlp(nn.Module):
    """Two linears with GELU between them.

    Args:
        width: of a token.
        mlp_width: hidden size.
        gelu: `none` for the exact one, by the error function, or its approximation by `tanh`.
    """

    def __init__(self, width: int, mlp_width: int, gelu: str = "none") -> None:
        super().__init__()
        self.gelu = gelu
        self.up = nn.Linear(width, mlp_width)
        self.down = nn.Linear(mlp_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers to each token, (..., width) to (..., width)."""
        return self.down(F.gelu(self.up(x), approximate=self.gelu))


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


class ConditionLinear(nn.Linear):
    """A linear of a block that sees conditions and no tokens: as many rows as images, or as text has."""


def norm_of(spec: TransformerSpec) -> nn.LayerNorm:
    """Return a LayerNorm over the width of a token."""
    return nn.LayerNorm(spec.width, eps=spec.norm_eps, elementwise_affine=spec.norm_weights)


class Block(nn.Module):
    """Attention between tokens, then the MLP on each; norms come before, residuals around."""

    def __init__(self, spec: TransformerSpec, *, batch_first: bool) -> None:
        super().__init__()
        self.norm_attention = norm_of(spec)
        self.attention: nn.Module = Attention(spec.width, spec.num_heads, batch_first=batch_first)
        self.norm_mlp = norm_of(spec)
        self.mlp: Mlp | SwiGlu = (
            SwiGlu(spec.width, spec.mlp_width)
            if spec.mlp == "swiglu"
            else Mlp(spec.width, spec.mlp_width, spec.gelu)
        )
        self.scale_attention: nn.Parameter | None = None
        self.scale_mlp: nn.Parameter | None = None
        if spec.layer_scale:
            self.scale_attention = nn.Parameter(torch.full((spec.width,), spec.layer_scale))
            self.scale_mlp = nn.Parameter(torch.full((spec.width,), spec.layer_scale))

    def forward(self, x: Any, context: Context | None = None) -> Any:
        """Transform the tokens of each image, or of each in a list of views; shapes stay."""
        if isinstance(x, list):  # one call, for which a sharding gathers once
            return [Block.forward(self, view, context) for view in x]
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

    def split(self, boundary: Boundary) -> None:
        """Keep this rank's heads and hidden units, of weights that are whole on every rank.

        Args:
            boundary: what lies outside the pairs of matrices.
        """
        attention: nn.Module = self.attention
        # q, k and v are fused: each is cut by heads for itself.
        become(attention.qkv, ColumnParallelLinear).take(boundary, parts=3)
        become(attention.out, RowParallelLinear).take(boundary)
        # So are gate and up of SwiGLU.
        num_fused = 2 if isinstance(self.mlp, SwiGlu) else 1
        become(self.mlp.up, ColumnParallelLinear).take(boundary, parts=num_fused)
        become(self.mlp.down, RowParallelLinear).take(boundary)
        attention.num_heads //= boundary.group.size()  # type: ignore[operator, assignment]


class Stack(nn.ModuleList):
    """Blocks of one width that run one after the other, on tokens that lie along the same axes.

    A technique that shares tokens deals them out before the stack, and gathers them after its norm.

    Args:
        blocks: in their order.
        norm: of the last block's tokens. The network registers it, under a name of its own.
        axes: along which tokens lie, and between which blocks alternate; an image ViT has one.
        positions: entry of the context -> its axis with a position for each token along the first of `axes`,
            as queries and keys of attention have them (rotary angles). All others are whole on every rank.

    Attributes:
        axes: as given.
        positions: as given.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        *,
        norm: nn.Module,
        axes: tuple[TokenAxis, ...],
        positions: Mapping[str, TokenAxis] | None = None,
    ) -> None:
        super().__init__(blocks)
        self.axes, self.positions = axes, positions or {}
        self._norm = (norm,)  # in a tuple, or it would be registered twice

    @property
    def norm(self) -> nn.Module:
        """The norm after the last block."""
        return self._norm[0]

    def forward(self, x: Tensor, context: Context | None = None, /) -> Tensor:
        """Run the blocks; the shape of the tokens stays."""
        for block in self:
            x = block(x, context)
        return x


class Network(nn.Module):
    """An entrance, a stack of blocks, and an exit.

    One with more stacks registers them in the order in which its `forward` runs them.
    """

    spec: TransformerSpec
    embedding: nn.Module
    blocks: Stack

    def enter(self, inputs: Tensor) -> tuple[Tensor, Context | None]:
        """Return the tokens of the first block, and what all blocks read besides."""
        return self.embedding(inputs), None

    def read_out(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Predict from the tokens of the last block, beginning with the norm after it."""
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed, transform, read out."""
        x, context = self.enter(inputs)
        return self.read_out(self.blocks(x, context), context)


def stacks_of(model: nn.Module) -> list[Stack]:
    """Return the stacks of a network; a model of the user's has none."""
    return [m for m in model.modules() if isinstance(m, Stack)]


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


def split_blocks(stack: Stack, boundary_of: Callable[[nn.Module], Boundary]) -> None:
    """Keep this rank's heads and hidden units in every block, whose weights are the same on every rank.

    Args:
        stack: blocks.
        boundary_of: block of the stack -> what lies outside its pairs of matrices.
    """
    for outer in stack:
        boundary = boundary_of(outer)
        for block in outer.modules():
            if isinstance(block, Block):
                block.split(boundary)


def split_replicated(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Split every block over the ranks of a group, all of which have all tokens outside."""
    boundary = Replicated(group)
    for stack in stacks_of(model):
        split_blocks(stack, lambda block: boundary)
    return model
