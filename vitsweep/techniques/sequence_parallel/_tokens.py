"""Dealing out the tokens of an image after the embedding, and gathering them after the last norm."""

from collections.abc import Callable

from torch import Tensor, cat, nn
from torch.distributed import ProcessGroup

from vitsweep.collectives.lengths import pad, share
from vitsweep.collectives.shards import gather, split
from vitsweep.model.attention import Attend
from vitsweep.model.tokens import TokenAxis, attentions_along


def deal_tokens(
    model: nn.Module,
    at_first: TokenAxis,
    at_last: TokenAxis,
    group: ProcessGroup,
    zigzag_ranks: int = 0,
    unit: int | None = None,
) -> None:
    """Let blocks and the last norm work on this rank's tokens; embedding and head see all of them.

    Args:
        model: with `embedding`, `blocks`, `norm`.
        at_first: axis along which the first block finds the tokens sharded.
        at_last: the same after the last block.
        group: ranks that share the tokens of an image.
        zigzag_ranks: length of the ring over which parts are dealt out from both ends; 0 deals them
            out in their order.
        unit: the number of tokens is padded to a multiple of it; the size of the group if None.
    """
    unit = 2 * group.size() if zigzag_ranks else unit or group.size()
    padded = unit * share(at_last.length, unit)

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


def to_zigzag(x: Tensor, along: TokenAxis, ranks: int) -> Tensor:
    """Order 2 n equal parts as 0, 2n-1, 1, 2n-2, ...: under a causal mask all pairs cost alike.

    (USP, arXiv:2405.07719, algorithm 2; zhuzilin/ring-flash-attention.)
    """
    parts = x.chunk(2 * ranks, along.axis)
    return cat([parts[i] for r in range(ranks) for i in (r, 2 * ranks - 1 - r)], along.axis)


def from_zigzag(x: Tensor, along: TokenAxis, ranks: int) -> Tensor:
    """Undo `to_zigzag`."""
    parts = x.chunk(2 * ranks, along.axis)
    return cat([*parts[0::2], *reversed(parts[1::2])], along.axis)
