"""Stochastic depth: the branches of a block are left out for some images (arXiv:1603.09382)."""

from typing import Any

import torch
from torch import Tensor, nn

from vitsweep.model.block import Block, blocks_of


def drop_paths(model: nn.Module, rate: float, *, batch_first: bool) -> nn.Module:
    """Leave out attention and MLP of each block for some images while the model trains.

    The rate grows in a line from 0 at the first block to `rate` at the last one; what is kept is
    divided by the share that is kept. Random numbers are torch's own, of the rank.

    Args:
        model: a transformer; changed in place.
        rate: share of images for which the last block's branches are left out.
        batch_first: whether the first axis of the tokens, rather than the second, is the batch.
    """
    blocks = [block for block in blocks_of(model) if isinstance(block, Block)]
    for index, block in enumerate(blocks):
        own = rate * index / max(1, len(blocks) - 1)
        if own:
            for branch in (block.attention, block.mlp):
                branch.register_forward_hook(_Dropped(own, batch_axis=0 if batch_first else 1))
    return model


class _Dropped:
    """A forward hook that sets a branch's output to zero for some images."""

    def __init__(self, rate: float, batch_axis: int) -> None:
        self._keep, self._batch_axis = 1 - rate, batch_axis

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        if not module.training:
            return None
        shape = [1] * output.ndim
        shape[self._batch_axis] = output.shape[self._batch_axis]
        kept = torch.empty(shape, device=output.device, dtype=output.dtype).bernoulli_(self._keep)
        return output * kept / self._keep
