"""Nothing set, when Python collects garbage, and which cores a rank runs on."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from vitsweep.errors import VitsweepError
from vitsweep.spec.technique import Runtime

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec

NUMA_NODES = Path("/sys/devices/system/node")
PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, kw_only=True)
class AutomaticGarbage(Runtime):
    """Python collects garbage whenever it likes, as in a script that leaves it alone.

    A collection of the oldest generation stops a rank for tens of milliseconds, and all others wait for
    it. This choice shows what that costs.
    """

    collects_garbage: ClassVar[Literal["paused", "automatic", "scheduled"]] = "automatic"


@dataclass(frozen=True, kw_only=True)
class ScheduledGarbage(Runtime):
    """Python collects the two young generations every few steps, on all ranks at the same time.

    As in torchtitan (`utils.GarbageCollection`). Without any collection host memory grows by what lies
    in reference cycles.

    Attributes:
        every_steps: optimizer steps between two collections.
    """

    every_steps: Annotated[int, Gt(0)]

    collects_garbage: ClassVar[Literal["paused", "automatic", "scheduled"]] = "scheduled"

    @property
    def collect_every_steps(self) -> int:
        """Steps between two collections."""
        return self.every_steps


@dataclass(frozen=True, kw_only=True)
class BoundCores(Runtime):
    """Each rank, with its threads and loader workers, stays on cores of its own.

    Memory lies with the cores that first write it (Linux's default policy), so that a bound rank reads
    memory of its own NUMA node.

    Attributes:
        to: `cores`: equal parts of the cores that the job has, neighbours together; `numa_node`: all
            cores of the NUMA node of the rank's GPU, or on CPUs of a node shared by as many ranks as
            there are for each.
    """

    to: Literal["cores", "numa_node"]

    def lacking_here(self, cell: "CellSpec") -> Iterator[str]:
        """Say where there is one NUMA node."""
        if self.to == "numa_node" and cell.resources.device == "cpu" and len(numa_nodes()) < 2:
            yield (
                f"`runtime={self.name}` needs several NUMA nodes, and this machine shows "
                f"{len(numa_nodes())}: use `runtime=bind_cores`, or `runtime=plain`."
            )

    def set_up(self, cell: "CellSpec", local_rank: int) -> None:
        """Let this process run on its cores alone.

        Raises:
            VitsweepError: the job has fewer cores on this node than ranks, or the node no NUMA nodes.
        """
        super().set_up(cell, local_rank)
        allowed = os.sched_getaffinity(0)
        if self.to == "cores":
            own = share_of_cores(allowed, local_rank, cell.resources.ranks_per_node)
        elif cell.resources.device == "cuda":
            own = allowed & numa_nodes().get(_numa_node_of_gpu(local_rank), set())
        else:
            nodes = list(numa_nodes().values())
            own = allowed & nodes[local_rank * len(nodes) // cell.resources.ranks_per_node]
        if not own:
            raise VitsweepError(
                f"`runtime={self.name}` finds no core for rank {local_rank} of this node among the "
                f"{len(allowed)} that the job may use: ask for more cores, or use `runtime=plain`."
            )
        os.sched_setaffinity(0, own)


def share_of_cores(allowed: set[int], local_rank: int, ranks: int) -> set[int]:
    """Return a rank's part of the cores: as many for each rank, those of one NUMA node together."""
    node_of = {core: node for node, cores in numa_nodes().items() for core in cores}
    ordered = sorted(allowed, key=lambda core: (node_of.get(core, 0), core))
    per_rank = len(ordered) // ranks
    return set(ordered[local_rank * per_rank : (local_rank + 1) * per_rank])


def numa_nodes(root: Path = NUMA_NODES) -> dict[int, set[int]]:
    """Return NUMA node -> its cores, as Linux shows them; nodes without cores are left out."""
    found = {
        int(path.name.removeprefix("node")): _cores((path / "cpulist").read_text(encoding="utf-8"))
        for path in root.glob("node[0-9]*")
    }
    return {node: cores for node, cores in sorted(found.items()) if cores}


def _cores(text: str) -> set[int]:
    """Return the cores of a list such as `0-3,8`."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {core for part in ranges for core in range(int(part[0]), int(part[-1]) + 1)}


def _numa_node_of_gpu(local_rank: int) -> int:
    import torch

    index = local_rank if torch.cuda.device_count() > 1 else 0
    properties = torch.cuda.get_device_properties(index)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    try:
        return max(0, int((PCI_DEVICES / address / "numa_node").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return 0
