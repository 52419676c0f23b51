"""What a cell runs on, and what the machine that plans it offers."""

import os
from dataclasses import dataclass, field
from functools import cache
from math import inf, prod
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from vitsweep.control_group import allowed_cores, cpu_quota
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
        device: type of the device of each rank, `cpu` or `cuda`.
        threads_per_rank: intra-op threads; auto = cores / the most ranks that a cell of the sweep has on a
            node, never less than one: ranks of a scaling curve have equal cores.
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


# What the machine offers on which a sweep is made: the source of every `auto`.


HERE = "this machine"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts of a node.

    Attributes:
        device: `cuda` where GPUs are usable.
        cores_per_node: cores this process may use.
        cpu_quota: CPUs that its control group may use, where these are fewer than its cores.
        devices_per_node: usable GPUs.
        described_by: where the facts come from (`this machine`, or the name of a site profile).
        gib_per_device: memory of one GPU that tensors may take, where it is known without looking at it.
        least_gib: the same of the smallest of its GPUs.
        has_tf32: whether its GPUs are known to multiply float32 as TF32; None where it is not known.
        profiles: of `--hardware` that its GPUs may have, by name; None for those of this machine.
        most_ranks: on a node, of all cells that are planned together; 0 where there is one cell.
        nodes: how many like it there are; infinite where something else grants them.
    """

    device: Device
    cores_per_node: int
    devices_per_node: int
    cpu_quota: float | None = None
    described_by: str = HERE
    gib_per_device: float | None = None
    least_gib: float | None = None
    has_tf32: bool | None = None
    profiles: tuple[str, ...] | None = None
    most_ranks: int = 0
    nodes: float = inf

    @classmethod
    def here(cls) -> "Machine":
        """Look at this machine, without loading torch (a login node plans thousands of cells)."""
        gpus, capability, quota = count_gpus(), gpu_capability(), cpu_quota()
        return cls(
            device="cuda" if gpus else "cpu",
            cores_per_node=allowed_cores(),
            cpu_quota=quota if quota and quota < len(os.sched_getaffinity(0)) else None,
            devices_per_node=gpus,
            has_tf32=capability >= TF32_CAPABILITY if gpus and capability else None,
        )

    @property
    def quota_notice(self) -> str:
        """What follows from a CPU quota, in a sentence; "" where there is none."""
        if self.cpu_quota is None:
            return ""
        return (
            f"The control group of this process has a CPU quota of {self.cpu_quota:.3g}, counted as "
            f"{self.cores_per_node} core{'s' * (self.cores_per_node > 1)}: `resources.threads_per_rank=auto` "
            "follows, which is part of a cell's id."
        )


def count_gpus() -> int:
    """Count the GPUs that CUDA_VISIBLE_DEVICES leaves to this process; 0 without a driver."""
    present, visible = len(_capabilities()), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([p for p in visible.split(",") if p.strip() not in ("", "-1")]))


TF32_CAPABILITY = (8, 0)
"""Of GPUs that can multiply float32 as TF32, from Ampere on."""
FP8_CAPABILITY = (8, 9)
"""Of GPUs with FP8 units, from Ada on."""


@cache
def gpu_capability() -> tuple[int, int] | None:
    """Return the compute capability of this machine's newest GPU; None without one.

    Without loading torch. NVML and CUDA may number the GPUs of a mixed machine in other orders, so that a
    rank on its older GPU hears of it from torch.
    """
    return max(_capabilities(), default=None)


def _capabilities() -> list[tuple[int, int]]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        found = [pynvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles]
        pynvml.nvmlShutdown()
    except Exception:  # no driver, no library, no permission: all mean that no GPU can be used
        return []
    return [(int(major), int(minor)) for major, minor in found]


# How the ranks are arranged: one degree per kind of parallelism.


AXES = ("pipeline", "replicate", "shard", "sequence", "ring", "ulysses", "tensor")
"""Outermost first: the chattiest axis (tensor) lies on adjacent ranks (USP, arXiv:2405.07719, tip 7).

Where inner degrees divide the ranks of a node, the ranks of a group have the same places on each of its
nodes: messages between nodes keep to the rail of their GPU, and no other order would gain anything.
"""

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
