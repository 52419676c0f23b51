"""Dealing out the tokens of an image after the embedding, and gathering them after the last norm."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vitsweep.collectives.shards import gather, split
from vitsweep.model.attention import Attend
from vitsweep.model.tokens import TokenAxis, attentions_along


def deal_tokens(
    model: nn.Module, at_first: TokenAxis, at_last: TokenAxis, group: ProcessGroup
) -> None:
    """Let blocks and the last norm work on this rank's tokens; embedding and head see all of them.

    Args:
        model: with `embedding`, `blocks`, `norm`.
        at_first: axis along which the first block finds the tokens sharded.
        at_last: the same after the last block.
        group: ranks that share the tokens of an image.
    """

    def deal(module: nn.Module, inputs: object, tokens: Tensor) -> Tensor:
        return split(tokens, at_first.axis, group)

    def collect(module: nn.Module, inputs: object, tokens: Tensor) -> Tensor:
        return gather(tokens, *at_last, group)

    # Hooks, because the model knows nothing of techniques and no name of a parameter may change.
    model.embedding.register_forward_hook(deal)  # type: ignore[union-attr]
    model.norm.register_forward_hook(collect)  # type: ignore[union-attr]


def replace_attend(
    model: nn.Module, along: TokenAxis, replacement: Callable[[Attend], Attend]
) -> None:
    """Give every attention along the sharded axis another `attend`, made from its own."""
    for attention in attentions_along(model, along.axis):
        attention.attend = replacement(attention.attend)
