"""What a cell runs on, and what the machine that plans it offers."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from vitsweep.spec.measurement import NOT_IDENTITY

Device = Literal["cpu", "cuda"]
LARGEST_WORLD = 2**31 - 1
"""Ranks of a process group: torch counts them in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Nodes, ranks and threads of one cell; every `auto` is resolved when the sweep is made.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: processes on each node, one per GPU on `cuda`.
        device: where the model lives.
        threads_per_rank: intra-op threads; auto = cores / ranks, never less than one.
        memory_gib_per_rank: budget of a rank on `cpu`; above it allocation fails and the cell ends
            as `out_of_memory`. None sets no limit.
        cores_per_node: cores that the ranks of a node share (a fact of the machine, not asked for).
        devices_per_node: GPUs of a node (a fact as well; 0 on a machine without).
    """

    nodes: Annotated[int, Gt(0)]
    ranks_per_node: Annotated[int, Gt(0)]
    device: Device = field(metadata=NOT_IDENTITY)
    threads_per_rank: Annotated[int, Gt(0)]
    memory_gib_per_rank: Annotated[float, Gt(0), Le(2**20)] | None
    cores_per_node: Annotated[int, Gt(0)] = field(metadata=NOT_IDENTITY)
    devices_per_node: Annotated[int, Ge(0)] = field(metadata=NOT_IDENTITY)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def oversubscribed(self) -> bool:
        """True where ranks share cores, so that throughput says nothing about scaling."""
        return (
            self.device == "cpu"
            and self.ranks_per_node * self.threads_per_rank > self.cores_per_node
        )
