"""The two pairs of Megatron's operators around a pair of split matrices (arXiv:1909.08053, 2205.05198).

Each backward pass is the other one's forward pass. The loss is counted once per group here: no
gradient is scaled.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives import raw
from vitsweep.collectives.lengths import pad
from vitsweep.collectives.purpose import Purpose


def enter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Hand a tensor that all ranks have to their split matrices (f): backward is an all-reduce."""
    return _Enter.apply(x, group, "activation")


def used_in_parts(parameter: Tensor, group: ProcessGroup) -> Tensor:
    """Use a whole parameter on other tokens on each rank: backward sums its gradient."""
    return _Enter.apply(parameter, group, "gradient")


def leave(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the ranks' partial products (g): an all-reduce; backward is the identity."""
    return _Leave.apply(x, group)


def enter_gathering(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Join the ranks' tokens (g-bar): an all-gather; backward is a reduce-scatter."""
    return _Join.apply(x, axis, group)


def leave_scattering(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Sum partial products and keep own tokens: a reduce-scatter; backward is an all-gather."""
    return _Deal.apply(x, axis, group)


def split_alike(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Keep own part of what all ranks compute alike; backward joins their gradients."""
    return _Own.apply(pad(x, axis, group.size()), axis, group)


def join_alike(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Join parts for what all ranks compute alike; backward keeps the own part of the gradient."""
    return _JoinAlike.apply(x, axis, group)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, purpose: Purpose) -> Tensor:
        ctx.group, ctx.purpose = group, purpose
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return raw.all_reduce(gradient, ctx.group, ctx.purpose), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return raw.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return raw.all_gather(x, axis, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return raw.reduce_scatter(gradient, ctx.axis, ctx.group), None, None


class _Deal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return raw.reduce_scatter(x, axis, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return raw.all_gather(gradient, ctx.axis, ctx.group), None, None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return x.chunk(group.size(), axis)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return raw.all_gather(gradient, ctx.axis, ctx.group), None, None


class _JoinAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return raw.all_gather(x, axis, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = gradient.chunk(ctx.group.size(), ctx.axis)[ctx.group.rank()]
        return own.contiguous(), None, None
