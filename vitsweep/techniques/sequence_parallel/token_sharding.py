"""Shard the tokens of an image before each stack of blocks, and gather them after its norm (needs torch)."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, cat, nn
from torch.distributed import ProcessGroup

from vitsweep.collectives.parallel_linear import gather_from_sequence_parallel
from vitsweep.collectives.primitives import pad
from vitsweep.collectives.resharding import gather, split, switch
from vitsweep.model.attention import Attend, TokenAxis
from vitsweep.model.block import Context, Stack, stacks_of
from vitsweep.spec.model_parallel import padded_share
from vitsweep.world import World


def shard_tokens(
    stack: Stack,
    at_first: TokenAxis,
    at_last: TokenAxis,
    group: ProcessGroup,
    zigzag_ranks: int = 0,
    *,
    is_last: bool = True,
    positions: Mapping[str, TokenAxis] | None = None,
) -> None:
    """Let blocks and the norm after them work on this rank's tokens; what lies outside sees all of them.

    Args:
        stack: blocks.
        at_first: axis along which the first block finds the tokens sharded.
        at_last: the same after the last block.
        group: ranks that share the tokens of an image.
        zigzag_ranks: length of the ring over which parts are dealt out from both ends; 0 deals them
            out in their order.
        is_last: whether no other stack comes after it, so that all ranks compute the same from there on.
        positions: entries of the context that are dealt out as the tokens are, and along which of their axes.
    """
    unit = 2 * group.size() if zigzag_ranks else group.size()
    padded = unit * padded_share(at_last.length, unit)

    def own(x: Tensor, along: TokenAxis) -> Tensor:
        x = pad(x, along.axis, unit)
        if zigzag_ranks:
            x = to_zigzag(x, along, zigzag_ranks)
        return split(x, along.axis, group)

    def own_context(context: Context | None) -> Context | None:
        dealt = positions or {}
        return context and context | {name: own(context[name], dealt[name]) for name in dealt}

    def deal(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *contexts = inputs
        return own(tokens, at_first), *map(own_context, contexts)

    def collect(module: nn.Module, inputs: object, tokens: Tensor) -> Tensor:
        if is_last:
            tokens = gather(tokens, at_last.axis, padded, group)
        else:  # of what follows each rank has the gradient of its own tokens of the next stack
            tokens = gather_from_sequence_parallel(tokens, at_last.axis, group)
        if zigzag_ranks:
            tokens = from_zigzag(tokens, at_last, zigzag_ranks)
        return tokens.narrow(at_last.axis, 0, at_last.length)

    # Hooks, because the model knows nothing of techniques and no name of a parameter may change.
    stack.register_forward_pre_hook(deal)
    stack.norm.register_forward_hook(collect)


def replace_attend(stack: Stack, replacement: Callable[[Attend, int], Attend]) -> None:
    """Give every attention along the first axis another `attend`, made from its own and the axis' length."""
    axis, length = stack.axes[0]
    for block in stack:
        if getattr(block, "axis", axis) == axis:
            block.attention.attend = replacement(block.attention.attend, length)  # type: ignore[union-attr,arg-type]


def on_own_tokens(
    model: nn.Module,
    world: World,
    attention: Callable[[Attend, int], Attend],
    zigzag_ranks: int = 0,
) -> nn.Module:
    """Shard the tokens of each stack along its first axis, and give attention along it another `attend`.

    Args:
        model: with stacks.
        world: its token ranks share an image.
        attention: makes it of the model's own, and of the number of tokens along the axis.
        zigzag_ranks: of a ring.
    """
    *_, last = stacks = stacks_of(model)
    group = world.token_group()
    for stack in stacks:
        along, is_last = stack.axes[0], stack is last
        shard_tokens(
            stack, along, along, group, zigzag_ranks, is_last=is_last, positions=stack.positions
        )
        replace_attend(stack, attention)
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

    There is one switch less than blocks in a stack: the last one is not switched back.
    """
    *_, last = stacks = stacks_of(model)
    for stack in stacks:
        first, second = stack.axes
        free = {first.axis: second, second.axis: first}
        blocks: list[Any] = list(stack)
        sharded = [free[block.axis] for block in blocks]
        shard_tokens(stack, sharded[0], sharded[-1], group, is_last=stack is last)
        for block, before, now in zip(blocks[1:], sharded, sharded[1:], strict=False):
            if before != now:
                block.register_forward_pre_hook(_switching(before, now, group))
    return model


def _switching(
    before: TokenAxis, now: TokenAxis, group: ProcessGroup
) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    def hook(block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        own = switch(x, whole=before.axis, sharded=now.axis, length=before.length, group=group)
        return own, *others

    return hook
