"""Split, switch and gather: the three ways to change along which axis a tensor is sharded.

(DSP, arXiv:2403.10266, table 2.) Axes of odd length are padded with zeros at their end; padding is
gone again as soon as an axis is whole.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives import primitives
from vitsweep.collectives.padding import check_share, pad, padded_share


def split(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Keep this rank's part of `axis`; nothing is sent.

    The gradient of the rest is zero here: it lies on the other ranks, so that gradients of what
    came before have to be summed over the group, like those of all weights in between.
    """
    own = padded_share(x.shape[axis], group.size())
    return pad(x, axis, group.size()).narrow(axis, group.rank() * own, own).contiguous()


def gather(x: Tensor, axis: int, length: int, group: ProcessGroup) -> Tensor:
    """Give every rank the whole of `axis`, `length` long: one all-gather.

    All ranks then compute the same loss. Its gradient is taken `size` times here, so that the
    *mean* over the group of the gradients of any weight, before, within or after the sharded part,
    is the gradient of the loss counted once. Nothing is sent in the backward pass.
    """
    check_share(x, axis, length, group)
    return _Gather.apply(x, axis, group).narrow(axis, 0, length)


def switch(x: Tensor, whole: int, sharded: int, length: int, group: ProcessGroup) -> Tensor:
    """Make axis `whole` whole (`length` long) and shard axis `sharded` instead: one all-to-all.

    Sends (n-1)/n of the local tensor; the backward pass is the reverse switch.
    """
    check_share(x, whole, length, group)
    return _AllToAll.apply(pad(x, sharded, group.size()), sharded, whole, group).narrow(
        whole, 0, length
    )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group, ctx.own = axis, group, x.shape[axis]
        return primitives.all_gather(x, axis, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = gradient.narrow(ctx.axis, ctx.group.rank() * ctx.own, ctx.own)
        return own * ctx.group.size(), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, concatenate: int, group: ProcessGroup) -> Tensor:
        ctx.axes, ctx.group = (concatenate, split), group
        return primitives.all_to_all(x, split, concatenate, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        split, concatenate = ctx.axes
        return primitives.all_to_all(gradient, split, concatenate, ctx.group), None, None, None
