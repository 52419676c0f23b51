"""How an axis is split over ranks: contiguously and evenly, padded at the end."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


def padded_share(length: int, ranks: int) -> int:
    """Length of every rank's part, padding included."""
    return -(-length // ranks)


def unpadded_length(length: int, part: int, index: int) -> int:
    """Length without padding of part number `index`, where every part is `part` long."""
    return min(part, max(0, length - index * part))


def pad(x: Tensor, axis: int, ranks: int) -> Tensor:
    """Append zeros along `axis` until its length is a multiple of `ranks`."""
    missing = padded_share(x.shape[axis], ranks) * ranks - x.shape[axis]
    return pad_to(x, axis, x.shape[axis] + missing)


def pad_to(x: Tensor, axis: int, length: int) -> Tensor:
    """Append zeros along `axis` up to `length`."""
    missing = length - x.shape[axis]
    if not missing:
        return x
    return F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [0, missing])


def check_share(x: Tensor, axis: int, length: int, group: ProcessGroup) -> None:
    """Make sure that a rank holds its share of an axis: unequal shares would hang a collective.

    Raises:
        ValueError: the local length is another than `padded_share(length, size)`.
    """
    expected = padded_share(length, group.size())
    if x.shape[axis] != expected:
        raise ValueError(
            f"Axis {axis} of a tensor {tuple(x.shape)} has {x.shape[axis]} positions on rank "
            f"{group.rank()}; {length} positions over {group.size()} ranks are {expected} on each, "
            "padding included. Split it with `resharding.split`."
        )


# Where parameters lie in a flat buffer (needs torch).


ALIGNMENT_BYTES = 256
"""Every view starts at a multiple of it: matrix kernels want aligned operands (cuBLAS: 16 B)."""


def aligned(numbers: int, element_size: int) -> int:
    """Return the least multiple of the alignment that holds so many numbers, in numbers."""
    step = ALIGNMENT_BYTES // element_size
    return -(-numbers // step) * step


def view_like(buffer: Tensor, like: Tensor, start: int) -> Tensor:
    """Return a part of `buffer` with the shape of `like`, channels_last where `like` is."""
    part = buffer[start : start + like.numel()]
    if like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last):
        return part.as_strided(like.size(), like.stride(), part.storage_offset())
    return part.view(like.shape)
