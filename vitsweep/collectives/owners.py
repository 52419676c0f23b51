"""Whole matrices on the ranks that own them, from the parts that sharding leaves on each (needs torch)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from vitsweep.collectives.primitives import sent_as


@dataclass(frozen=True)
class Parts:
    """Which numbers of a tensor, in row-major order, each rank of a group holds.

    Attributes:
        shape: of the whole tensor.
        bounds: rank r holds the numbers `bounds[r]` to `bounds[r + 1]`.
        group: the ranks; None for one alone.
    """

    shape: tuple[int, ...]
    bounds: tuple[int, ...]
    group: ProcessGroup | None

    def split(self, number: int) -> "list[Parts]":
        """Return the parts of so many equal tensors that lie in this one, one below the other."""
        rows, size = self.shape[0] // number, prod(self.shape) // number
        return [
            Parts(
                (rows, *self.shape[1:]),
                tuple(min(max(bound - first, 0), size) for bound in self.bounds),
                self.group,
            )
            for first in range(0, number * size, size)
        ]

    def length(self, rank: int) -> int:
        """Return how many numbers a rank holds."""
        return self.bounds[rank + 1] - self.bounds[rank]

    @property
    def own_length(self) -> int:
        """How many numbers this rank holds."""
        return self.length(self.group.rank() if self.group else 0)


def parts_of_rows(tensor: DTensor) -> Parts | None:
    """Return which rows of a DTensor each rank holds, as FSDP2 deals them out; None of other axes."""
    axis = tensor.device_mesh.ndim - 1  # in front of it are replicas
    if tensor.placements[axis] != Shard(0):
        return None
    group = tensor.device_mesh.get_group(axis)
    rows, row = tensor.shape[0], prod(tensor.shape[1:])
    share = -(-rows // group.size())
    bounds = tuple(min(rank * share, rows) * row for rank in range(group.size() + 1))
    return Parts(tuple(tensor.shape), bounds, group)


def owners_by_cost(costs: Sequence[float], ranks: int) -> list[int]:
    """Deal out work by falling cost, each piece to the rank with least so far (Graham, 1969)."""
    load, owners = [0.0] * ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[index] = min(range(ranks), key=load.__getitem__)
        load[owners[index]] += costs[index]
    return owners


class OwnedMatrices:
    """Sends the parts of matrices to the ranks that own them, and back: one all-to-all each way.

    Over n ranks that hold equal shares of P numbers in all, a rank sends P / n x (n - 1) / n numbers each way
    in the mean: of what it holds, all but what it owns itself.

    Args:
        parts: of each matrix, the same list on every rank of the group.
        costs: of each matrix, which are balanced over the owners.

    Attributes:
        owned: indices of the matrices that this rank owns.
    """

    def __init__(self, parts: Sequence[Parts], costs: Sequence[float]) -> None:
        self._parts, self._group = parts, parts[0].group
        self._rank = self._group.rank() if self._group else 0
        ranks = range(len(parts[0].bounds) - 1)
        owners = owners_by_cost(costs, len(ranks))
        by_owner = [[i for i, owner in enumerate(owners) if owner == rank] for rank in ranks]
        self.owned = by_owner[self._rank]
        self._order = [i for indices in by_owner for i in indices]
        self._held = [sum(parts[i].length(self._rank) for i in each) for each in by_owner]
        self._arriving = [sum(parts[i].length(rank) for i in self.owned) for rank in ranks]

    def gather(self, held: Sequence[Tensor]) -> list[Tensor]:
        """Return the whole matrices that this rank owns, from this rank's part (length,) of every matrix."""
        sent = torch.cat([held[i].reshape(-1) for i in self._order])
        arrived = self._exchange(sent, self._held, self._arriving).split(self._arriving)
        found: list[list[Tensor]] = [[] for _ in self.owned]
        for rank, values in enumerate(arrived):
            lengths = [self._parts[i].length(rank) for i in self.owned]
            for pieces, piece in zip(found, values.split(lengths), strict=True):
                pieces.append(piece)
        shapes = [self._parts[i].shape for i in self.owned]
        return [torch.cat(p).view(shape) for p, shape in zip(found, shapes, strict=True)]

    def scatter(self, owned: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Return this rank's part (length,) of every matrix, from the whole ones that it owns.

        Args:
            owned: in the order of `self.owned`.
            like: of whose dtype and device they are; a rank may own none.
        """
        sent = [
            matrix.reshape(-1)[self._parts[i].bounds[rank] : self._parts[i].bounds[rank + 1]]
            for rank in range(len(self._arriving))
            for i, matrix in zip(self.owned, owned, strict=True)
        ]
        joined = torch.cat(sent) if sent else like.new_empty(0)
        arrived = self._exchange(joined, self._arriving, self._held)
        lengths = [self._parts[i].length(self._rank) for i in self._order]
        found = dict(zip(self._order, arrived.split(lengths), strict=True))
        return [found[i] for i in range(len(self._parts))]

    def _exchange(self, sent: Tensor, here: list[int], there: list[int]) -> Tensor:
        if len(there) == 1:
            return sent
        received = sent.new_empty(sum(there))
        with sent_as("optimizer"):
            dist.all_to_all_single(received, sent, there, here, group=self._group)
        return received
