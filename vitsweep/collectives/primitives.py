"""Collectives on one tensor along any axis, without gradients, and why each of them is sent.

Spelled for torch 2.11 and 2.13.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Purpose = Literal["parameter", "gradient", "activation"]

_purpose: ContextVar[Purpose | None] = ContextVar("purpose", default=None)


@contextmanager
def sent_as(purpose: Purpose) -> Iterator[None]:
    """Count the bytes of all collectives inside under `purpose`.

    Compiled code leaves it out, since Dynamo would break the graph at it. Nothing is lost: the step that
    is counted runs under a dispatch mode, and so uncompiled.
    """
    if torch.compiler.is_compiling():
        yield
        return
    token = _purpose.set(purpose)
    try:
        yield
    finally:
        _purpose.reset(token)


def current_purpose() -> Purpose | None:
    """Return the purpose of the enclosing `sent_as`, or None outside of any."""
    return _purpose.get()


all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
"""torch 2.13 deprecates the old names of both, torch 2.11 does not have the new ones."""


def all_to_all(x: Tensor, split: int, concatenate: int, group: ProcessGroup) -> Tensor:
    """Send chunk i along axis `split` to rank i; join what arrives along axis `concatenate`.

    The length of `split` must be a multiple of the group's size. Both axes count from the front.
    """
    size = group.size()
    if size == 1:
        return x
    chunks = x.unflatten(split, (size, -1)).movedim(split, 0).contiguous()
    return (
        exchange_chunks(chunks, group).movedim(0, concatenate).flatten(concatenate, concatenate + 1)
    )


def exchange_chunks(chunks: Tensor, group: ProcessGroup) -> Tensor:
    """Send chunk i, along the first axis of a contiguous tensor, to rank i; return what arrives."""
    received = torch.empty_like(chunks)
    with sent_as("activation"):
        dist.all_to_all_single(received, chunks, group=group)
    return received


def all_gather(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Join the tensors of all ranks, of equal shape, along `axis`."""
    size = group.size()
    if size == 1:
        return x
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))  # gloo takes no other shape
    with sent_as("activation"):
        all_gather_single(gathered, x.contiguous(), group=group)
    return gathered.unflatten(0, (size, -1)).movedim(0, axis).flatten(axis, axis + 1)


def reduce_scatter(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Sum over the ranks; return this rank's chunk along `axis`, a multiple of the group's size."""
    size = group.size()
    if size == 1:
        return x
    chunks = x.unflatten(axis, (size, -1)).movedim(axis, 0).contiguous()
    own = torch.empty_like(chunks[0])
    with sent_as("activation"):
        reduce_scatter_single(own, chunks.flatten(0, 1), group=group)
    return own


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the ranks, into a new tensor."""
    if group.size() == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    with sent_as("activation"):
        dist.all_reduce(total, group=group)
    return total


def sum_together(tensors: Sequence[Tensor], group: ProcessGroup, purpose: Purpose) -> None:
    """Sum each of several tensors over the ranks, in place: one all-reduce per dtype."""
    if group.size() == 1:
        return
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        some = [t for t in tensors if t.dtype == dtype]
        joined = torch.cat([t.flatten() for t in some])
        with sent_as(purpose):
            dist.all_reduce(joined, group=group)
        pieces = joined.split([t.numel() for t in some])
        torch._foreach_copy_(some, [p.view_as(t) for p, t in zip(pieces, some, strict=True)])


def start_mean_scatter(whole: Tensor, own: Tensor, group: ProcessGroup) -> Any:
    """Begin to average `whole` (n S) over the ranks; `own` (S) gets this rank's part.

    Divided before it is summed, so that a sum of float16 gradients does not overflow.

    Returns:
        A handle; `own` holds the result after its `wait()`.
    """
    averages = whole.is_cuda  # NCCL divides within the collective
    if not averages:
        whole.div_(group.size())
    op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    with sent_as("gradient"):
        return reduce_scatter_single(own, whole, op=op, group=group, async_op=True)


def start_part_gather(whole: Tensor, group: ProcessGroup) -> Any:
    """Begin to give every rank all parts of `whole` (n S), of which each has its own in place.

    Returns:
        A handle; `whole` holds the result after its `wait()`.
    """
    own = whole.chunk(group.size())[group.rank()]
    with sent_as("parameter"):
        return all_gather_single(whole, own, group=group, async_op=True)


def broadcast_together(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Give every rank the first rank's tensors, in place: one broadcast per dtype."""
    source = dist.get_global_rank(group, 0)
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        some = [t for t in tensors if t.dtype == dtype]
        joined = torch.cat([t.flatten() for t in some])
        dist.broadcast(joined, source, group=group)
        pieces = joined.split([t.numel() for t in some])
        torch._foreach_copy_(some, [p.view_as(t) for p, t in zip(pieces, some, strict=True)])


class RingPass:
    """An asynchronous pass around a ring: sent to the next rank, received from the previous one.

    Args:
        tensor: what is sent; not to be changed until `arrived`.
        group: the ring; its last rank sends to its first.
        by: 1 sends to the next rank, -1 to the one before.
    """

    def __init__(self, tensor: Tensor, group: ProcessGroup, by: int = 1) -> None:
        size, rank = group.size(), group.rank()
        to, source = (dist.get_global_rank(group, (rank + i) % size) for i in (by, -by))
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(self._sent)
        pair = [
            dist.P2POp(dist.isend, self._sent, to, group),
            dist.P2POp(dist.irecv, self._received, source, group),
        ]
        with sent_as("activation"):
            self._works: list[Any] = dist.batch_isend_irecv(pair)

    def arrived(self) -> Tensor:
        """Wait (on CUDA: let the stream wait) and return what came."""
        for work in self._works:
            work.wait()
        return self._received
