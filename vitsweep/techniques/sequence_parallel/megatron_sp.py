"""Megatron-SP: tensor parallelism whose norms and residuals are sharded by tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitsweep.spec.model_parallel import SequenceParallel
from vitsweep.spec.rules import tensor_split_conflicts

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from vitsweep.collectives.parallel_linear import TokenSharded
    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class MegatronSp(SequenceParallel):
    """Sequence parallelism with tensor parallelism (Korthikanti et al., arXiv:2205.05198).

    The matrices of each block are split over `mesh.tensor`; the same ranks share the tokens outside
    of them. Per block two all-gathers and two reduce-scatters of the activations forward, and as
    many backward: the gathered inputs are kept, where Megatron-LM gathers them a second time.
    """

    axes: ClassVar[tuple[str, ...]] = ("tensor",)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse `tensor_parallel` beside it: this technique splits the same matrices."""
        yield from tensor_split_conflicts(cell, f"sequence_parallel={self.name}")
        if cell.tensor_parallel.axes:
            yield (
                f"`sequence_parallel={self.name}` splits the matrices over `mesh.tensor` itself: "
                f"use `tensor_parallel=none` instead of `{cell.tensor_parallel.name}`."
            )

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Split the linears of every block, and the tokens outside of them."""
        return shard_outside(model, world.axis("tensor").get_group())

    def complete_gradients(self, model: "nn.Module", world: "World") -> None:
        """Sum over the ranks what norms and biases outside the split matrices got from own tokens."""
        sum_over_tokens(model, world.axis("tensor").get_group())


def shard_outside(model: "nn.Module", group: "ProcessGroup") -> "nn.Module":
    """Split matrices and tokens over the same ranks.

    All ranks of the group are one replica here: gradients are not averaged over them. Embedding and
    head see all tokens, and get the same whole gradient on every rank.
    """
    from torch import Tensor, nn

    from vitsweep.collectives.parallel_linear import (
        TokenSharded,
        gather_replicated,
        scatter_to_sequence_parallel,
    )
    from vitsweep.model.attention import token_axes
    from vitsweep.model.block import become, split_blocks
    from vitsweep.model.precision import TokenShardedNorm

    along = token_axes(model)[0]
    outside = TokenSharded(group, along.axis, along.length)
    split_blocks(model, lambda block: _boundary(block, outside))
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    for norm in norms:
        become(norm, TokenShardedNorm)

    def deal(module: nn.Module, inputs: object, tokens: Tensor) -> Tensor:
        return scatter_to_sequence_parallel(tokens, along.axis, group)

    def collect(module: nn.Module, inputs: object, tokens: Tensor) -> Tensor:
        return gather_replicated(tokens, along.axis, group).narrow(along.axis, 0, along.length)

    model.embedding.register_forward_hook(deal)  # type: ignore[union-attr]
    model.norm.register_forward_hook(collect)  # type: ignore[union-attr]
    return model


def sum_over_tokens(model: "nn.Module", group: "ProcessGroup") -> None:
    """Sum the gradients of parameters that see own tokens only, in as few messages as dtypes."""
    from vitsweep.collectives.primitives import local, sum_together

    gradients: list[Any] = [p.grad for p in _seeing_own_tokens(model) if p.grad is not None]
    sum_together([local(g) for g in gradients], group, "gradient")


def _seeing_own_tokens(model: "nn.Module") -> "Iterator[nn.Parameter]":
    from vitsweep.collectives.parallel_linear import RowParallelLinear
    from vitsweep.model.block import Block
    from vitsweep.model.precision import TokenShardedNorm

    for module in model.modules():
        if isinstance(module, TokenShardedNorm):
            yield from (module.weight, module.bias)
        elif isinstance(module, RowParallelLinear):
            yield module.bias
        elif isinstance(module, Block):
            scales = (module.scale_attention, module.scale_mlp)
            yield from (scale for scale in scales if scale is not None)


def _boundary(block: "nn.Module", outside: "TokenSharded") -> "TokenSharded":
    """Return the boundary as the attention of `block` sees it.

    A block of a model with several axes flattens those it does not attend along into the batch.
    Where the sharded one is among them, ranks are joined along the batch, whose order attention
    does not care for, and padding is joined with it.
    """
    from vitsweep.collectives.parallel_linear import TokenSharded

    axis = getattr(block, "axis", outside.axis)
    if axis != outside.axis:
        return TokenSharded(outside.group, 0, None)
    if hasattr(block, "axis"):
        return TokenSharded(outside.group, 1, outside.length)
    return outside
