"""Shard the tokens of an image after the embedding, and gather them after the last norm (needs torch)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, cat, nn
from torch.distributed import ProcessGroup

from vitsweep.collectives.primitives import pad
from vitsweep.collectives.resharding import gather, split, switch
from vitsweep.model.attention import Attend, TokenAxis, attentions_along, token_axes
from vitsweep.spec.model_parallel import padded_share
from vitsweep.world import World


def shard_tokens(
    model: nn.Module,
    at_first: TokenAxis,
    at_last: TokenAxis,
    group: ProcessGroup,
    zigzag_ranks: int = 0,
) -> None:
    """Let blocks and the last norm work on this rank's tokens; embedding and head see all of them.

    Args:
        model: with `embedding`, `blocks`, `norm`.
        at_first: axis along which the first block finds the tokens sharded.
        at_last: the same after the last block.
        group: ranks that share the tokens of an image.
        zigzag_ranks: length of the ring over which parts are dealt out from both ends; 0 deals them
            out in their order.
    """
    unit = 2 * group.size() if zigzag_ranks else group.size()
    padded = unit * padded_share(at_last.length, unit)

    def deal(module: nn.Module, inputs: object, tokens: Tensor) -> Tensor:
        tokens = pad(tokens, at_first.axis, unit)
        if zigzag_ranks:
            tokens = to_zigzag(tokens, at_first, zigzag_ranks)
        return split(tokens, at_first.axis, group)

    def collect(module: nn.Module, inputs: object, tokens: Tensor) -> Tensor:
        tokens = gather(tokens, at_last.axis, padded, group)
        if zigzag_ranks:
            tokens = from_zigzag(tokens, at_last, zigzag_ranks)
        return tokens.narrow(at_last.axis, 0, at_last.length)

    # Hooks, because the model knows nothing of techniques and no name of a parameter may change.
    model.embedding.register_forward_hook(deal)  # type: ignore[union-attr]
    model.norm.register_forward_hook(collect)  # type: ignore[union-attr]


def replace_attend(
    model: nn.Module, along: TokenAxis, replacement: Callable[[Attend], Attend]
) -> None:
    """Give every attention along the sharded axis another `attend`, made from its own."""
    for attention in attentions_along(model, along.axis):
        attention.attend = replacement(attention.attend)


def on_own_tokens(
    model: nn.Module,
    world: World,
    attention: Callable[[Attend, int], Attend],
    zigzag_ranks: int = 0,
) -> nn.Module:
    """Shard the tokens along the first axis, and give attention along it another `attend`.

    Args:
        model: see `shard_tokens`, as the last one.
        world: its token ranks share an image.
        attention: makes it of the model's own, and of the number of tokens along the axis.
        zigzag_ranks: of a ring.
    """
    along = token_axes(model)[0]
    shard_tokens(model, along, along, world.token_group(), zigzag_ranks)
    replace_attend(model, along, lambda attend: attention(attend, along.length))
    return model


def to_zigzag(x: Tensor, along: TokenAxis, ranks: int) -> Tensor:
    """Order 2 n equal parts as 0, 2n-1, 1, 2n-2, ...: equal work per rank under a causal mask.

    (USP, arXiv:2405.07719, algorithm 2; zhuzilin/ring-flash-attention.)
    """
    parts = x.chunk(2 * ranks, along.axis)
    return cat([parts[i] for r in range(ranks) for i in (r, 2 * ranks - 1 - r)], along.axis)


def from_zigzag(x: Tensor, along: TokenAxis, ranks: int) -> Tensor:
    """Undo `to_zigzag`."""
    parts = x.chunk(2 * ranks, along.axis)
    return cat([*parts[0::2], *reversed(parts[1::2])], along.axis)


def switch_between_blocks(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Shard the tokens along the axis that each block does not attend along.

    There is one switch less than blocks: the last one is not switched back.
    """
    first, second = token_axes(model)
    free = {first.axis: second, second.axis: first}
    blocks = list(model.blocks)  # type: ignore[arg-type]
    sharded = [free[block.axis] for block in blocks]
    shard_tokens(model, sharded[0], sharded[-1], group)
    for block, before, now in zip(blocks[1:], sharded, sharded[1:], strict=False):
        if before != now:
            block.register_forward_pre_hook(_switching(before, now, group))
    return model


def _switching(
    before: TokenAxis, now: TokenAxis, group: ProcessGroup
) -> Callable[[Any, tuple[Tensor, ...]], Tensor]:
    def hook(block: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return switch(
            inputs[0], whole=before.axis, sharded=now.axis, length=before.length, group=group
        )

    return hook
