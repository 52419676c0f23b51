"""Norms and residuals whose tokens are shared by the ranks that split the matrices (needs torch)."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vitsweep.collectives.parallel_linear import (
    RowParallelLinear,
    TokenSharded,
    gather_replicated,
    scatter_to_sequence_parallel,
)
from vitsweep.collectives.primitives import local, sum_together
from vitsweep.model.block import Block, Stack, become, split_blocks, stacks_of
from vitsweep.model.precision import TokenShardedNorm


def shard_outside(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Split matrices and tokens over the same ranks.

    All ranks of the group are one replica here: gradients are not averaged over them. What lies outside of
    stacks sees all tokens, and gets the same whole gradient on every rank.
    """
    for stack in stacks_of(model):
        _shard(stack, group)
    return model


def _shard(stack: Stack, group: ProcessGroup) -> None:
    axis, length = stack.axes[0]
    outside = TokenSharded(group, axis, length)
    split_blocks(stack, lambda block: _boundary(block, outside))
    for norm in [*stack.modules(), stack.norm]:
        if isinstance(norm, nn.LayerNorm) and norm.elementwise_affine:
            become(norm, TokenShardedNorm)

    def deal(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *context = inputs
        return scatter_to_sequence_parallel(tokens, axis, group), *context

    def collect(module: nn.Module, inputs: object, tokens: Tensor) -> Tensor:
        return gather_replicated(tokens, axis, group).narrow(axis, 0, length)

    stack.register_forward_pre_hook(deal)
    stack.norm.register_forward_hook(collect)


def sum_over_tokens(model: nn.Module, group: ProcessGroup) -> None:
    """Sum the gradients of parameters that see own tokens only, in as few messages as dtypes."""
    gradients: list[Any] = [p.grad for p in _seeing_own_tokens(model) if p.grad is not None]
    sum_together([local(g) for g in gradients], group, "gradient")


def _seeing_own_tokens(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, TokenShardedNorm):
            yield from (module.weight, module.bias)
        elif isinstance(module, RowParallelLinear):
            yield module.bias
        elif isinstance(module, Block):
            scales = (module.scale_attention, module.scale_mlp)
            yield from (scale for scale in scales if scale is not None)


def _boundary(block: nn.Module, outside: TokenSharded) -> TokenSharded:
    """Return the boundary as the attention of `block` sees it.

    A block of a model with several axes flattens those it does not attend along into the batch.
    Where the sharded one is among them, ranks are joined along the batch, whose order attention
    does not care for, and padding is joined with it.
    """
    if isinstance(block, Block):  # its linears see tokens as they lie outside
        return outside
    if block.axis != outside.axis:
        return TokenSharded(outside.group, 0, None)
    return TokenSharded(outside.group, 1, outside.length)
