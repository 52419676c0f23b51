"""The two pairs of Megatron's operators around a pair of split matrices (arXiv:1909.08053, 2205.05198).

Each backward pass is the other one's forward pass. The loss is counted once per group here: no
gradient is scaled.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives import primitives
from vitsweep.collectives.padding import pad


def copy_to_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """Pass on a tensor that all ranks hold (Megatron's f); the backward pass is an all-reduce."""
    return _CopyToTensorParallel.apply(x, group)


def reduce_from_tensor_parallel(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the ranks' partial products (g): an all-reduce; backward is the identity."""
    return _ReduceFromTensorParallel.apply(x, group)


def gather_from_sequence_parallel(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Join the ranks' tokens (g-bar): an all-gather; backward is a reduce-scatter."""
    return _GatherFromSequenceParallel.apply(x, axis, group)


def reduce_scatter_to_sequence_parallel(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Sum partial products and keep own tokens: a reduce-scatter; backward is an all-gather."""
    return _ReduceScatterToSequenceParallel.apply(x, axis, group)


def scatter_to_sequence_parallel(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Keep this rank's part of a replicated tensor; the backward pass is an all-gather."""
    return _ScatterToSequenceParallel.apply(pad(x, axis, group.size()), axis, group)


def gather_replicated(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """All-gather for replicated computation; backward keeps this rank's part of the gradient."""
    return _GatherReplicated.apply(x, axis, group)


class _CopyToTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return primitives.all_reduce(gradient, ctx.group), None


class _ReduceFromTensorParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return primitives.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _GatherFromSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return primitives.all_gather(x, axis, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return primitives.reduce_scatter(gradient, ctx.axis, ctx.group), None, None


class _ReduceScatterToSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return primitives.reduce_scatter(x, axis, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return primitives.all_gather(gradient, ctx.axis, ctx.group), None, None


class _ScatterToSequenceParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return x.chunk(group.size(), axis)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return primitives.all_gather(gradient, ctx.axis, ctx.group), None, None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
        ctx.axis, ctx.group = axis, group
        return primitives.all_gather(x, axis, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        own = gradient.chunk(ctx.group.size(), ctx.axis)[ctx.group.rank()]
        return own.contiguous(), None, None
