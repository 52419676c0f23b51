"""Switches before the blocks that attend along the sharded axis (needs torch)."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from vitsweep.collectives.shards import switch
from vitsweep.model.tokens import TokenAxis, token_axes
from vitsweep.techniques.sequence_parallel._tokens import deal_tokens


def switch_between_blocks(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Shard the tokens along the axis that each block leaves free.

    There is one switch less than blocks: the last one is not switched back.
    """
    first, second = token_axes(model)
    free = {first.axis: second, second.axis: first}
    blocks = list(model.blocks)  # type: ignore[arg-type]
    sharded = [free[block.axis] for block in blocks]
    deal_tokens(model, sharded[0], sharded[-1], group)
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
