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
from vitsweep.model.attention import token_axes
from vitsweep.model.block import Block, become, split_blocks
from vitsweep.model.precision import TokenShardedNorm


def shard_outside(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Split matrices and tokens over the same ranks.

    All ranks of the group are one replica here: gradients are not averaged over them. Embedding and
    head see all tokens, and get the same whole gradient on every rank.
    """
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
    axis = getattr(block, "axis", outside.axis)
    if axis != outside.axis:
        return TokenSharded(outside.group, 0, None)
    if hasattr(block, "axis"):
        return TokenSharded(outside.group, 1, outside.length)
    return outside
