"""Handing a tensor on to the next rank of a group while something else is computed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from vitsweep.collectives.purpose import sent_as


class Passing:
    """A tensor on its way: sent to the next rank, arriving from the one before.

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
