"""How the ranks are arranged: one degree per kind of parallelism."""

from dataclasses import dataclass
from math import prod

AXES = ("pipeline", "replicate", "shard", "sequence", "ring", "ulysses", "tensor")
"""Outermost first: the chattiest axis (tensor) lies on adjacent ranks (USP, arXiv:2405.07719, tip 7)."""

TOKEN_AXES = ("sequence", "ring", "ulysses")
"""Axes along which ranks share the tokens of one image."""


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Degrees of the device mesh; their product is the world size.

    `replicate` is what is left when all other degrees are taken out of the world.
    """

    pipeline: int
    replicate: int
    shard: int
    sequence: int
    ring: int
    ulysses: int
    tensor: int

    def degrees(self) -> tuple[int, ...]:
        """Return the degrees in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the index of a rank along each of `AXES` (the last axis runs fastest)."""
        rest, indices = rank, []
        for degree in reversed(self.degrees()):
            rest, index = divmod(rest, degree)
            indices.append(index)
        return tuple(reversed(indices))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.degrees())

    @property
    def data_parallel_size(self) -> int:
        """Ranks that see different images."""
        return self.replicate * self.shard

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share the tokens of one image."""
        return self.sequence * self.ring * self.ulysses

    @property
    def gradient_shares(self) -> int:
        """Ranks whose gradients of one weight are averaged."""
        return self.data_parallel_size * self.sequence_parallel_size

    @property
    def state_shards(self) -> int:
        """Ranks over which one copy of the state is spread where it is sharded."""
        return self.shard * self.sequence_parallel_size
