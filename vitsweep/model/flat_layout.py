"""Where parameters lie in a flat buffer (needs torch)."""

import torch
from torch import Tensor

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
