"""Collectives on one tensor along any axis, without gradients; spelled for torch 2.11 and 2.13."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives.purpose import Purpose, sent_as

# torch 2.13 deprecates the first names, torch 2.11 does not have the second.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_to_all(x: Tensor, split: int, concatenate: int, group: ProcessGroup) -> Tensor:
    """Send chunk i along axis `split` to rank i; join what arrives along axis `concatenate`.

    The length of `split` must be a multiple of the group's size. Both axes count from the front.
    """
    size = group.size()
    if size == 1:
        return x
    chunks = x.unflatten(split, (size, -1)).movedim(split, 0).contiguous()
    received = torch.empty_like(chunks)
    with sent_as("activation"):
        dist.all_to_all_single(received, chunks, group=group)
    return received.movedim(0, concatenate).flatten(concatenate, concatenate + 1)


def all_gather(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Join the tensors of all ranks, of equal shape, along `axis`."""
    size = group.size()
    if size == 1:
        return x
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))  # gloo takes no other shape
    with sent_as("activation"):
        _all_gather(gathered, x.contiguous(), group=group)
    return gathered.unflatten(0, (size, -1)).movedim(0, axis).flatten(axis, axis + 1)


def reduce_scatter(x: Tensor, axis: int, group: ProcessGroup) -> Tensor:
    """Sum over the ranks; return this rank's chunk along `axis`, a multiple of the group's size."""
    size = group.size()
    if size == 1:
        return x
    chunks = x.unflatten(axis, (size, -1)).movedim(axis, 0).contiguous()
    own = torch.empty_like(chunks[0])
    with sent_as("activation"):
        _reduce_scatter(own, chunks.flatten(0, 1), group=group)
    return own


def all_reduce(x: Tensor, group: ProcessGroup, purpose: Purpose = "activation") -> Tensor:
    """Sum over the ranks, into a new tensor."""
    if group.size() == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    with sent_as(purpose):
        dist.all_reduce(total, group=group)
    return total
