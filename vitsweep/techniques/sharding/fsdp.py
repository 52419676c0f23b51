"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer state in shards."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import PrecisionPlan, Sharding

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Fsdp(Sharding):
    """`fully_shard` on every block and on the root.

    Attributes:
        reshard_after_forward: True frees a block's gathered parameters between forward and
            backward (ZeRO-3, `fsdp`); False keeps them until backward has used them (`zero2`).
    """

    reshard_after_forward: bool

    axes: ClassVar[tuple[str, ...]] = ("shard",)
    shards_parameters: ClassVar[bool] = True

    def apply(self, model: "nn.Module", plan: PrecisionPlan, world: "World") -> "nn.Module":
        """Shard blocks, then the rest; float32 norms inside a half model form units of their own."""
        from vitsweep.techniques.sharding.fsdp_units import shard_units

        shard_units(model, plan, self.mesh(world), self.reshard_after_forward)
        return model

    def mesh(self, world: "World") -> "DeviceMesh":
        """Return the mesh over which one copy of the state is spread."""
        return world.state_mesh(replicated=False)

    def gradient_sync(
        self, model: "nn.Module", is_last_micro_batch: bool
    ) -> AbstractContextManager[None]:
        """Reduce-scatter gradients on the last micro-batch only."""
        cast("FSDPModule", model).set_requires_gradient_sync(is_last_micro_batch)
        return nullcontext()

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse several copies of the state: that is HSDP."""
        if cell.mesh.replicate > 1:
            yield (
                f"`sharding={self.name}` spreads one copy of the state over all replicas, but "
                f"`mesh.shard={cell.mesh.shard}` leaves {cell.mesh.replicate} copies: use "
                "`mesh.shard=auto`, or `sharding=hsdp`."
            )


@dataclass(frozen=True, kw_only=True)
class Hsdp(Fsdp):
    """Hybrid sharding: shards within a group of ranks, replicas of the groups (HSDP)."""

    @staticmethod
    def default_shards(data_parallel_size: int, resources: dict[str, Any]) -> int:
        """One copy of the state per node; on a single node two, or as few as divide the ranks."""
        if resources["nodes"] > 1:
            return int(resources["ranks_per_node"])
        halves = range(data_parallel_size // 2, 0, -1)
        return next((shards for shards in halves if data_parallel_size % shards == 0), 1)

    def mesh(self, world: "World") -> "DeviceMesh":
        """Replicate over the first axis, shard over the second."""
        return world.state_mesh(replicated=True)

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse fewer than two copies (FSDP) and fewer than two shards (DDP)."""
        mesh = cell.mesh
        if mesh.replicate == 1 or mesh.state_shards == 1:
            yield (
                f"`sharding={self.name}` needs at least 2 replicas of at least 2 shards; "
                f"`mesh.shard={mesh.shard}` over {mesh.gradient_shares} ranks "
                f"gives {mesh.replicate} x {mesh.state_shards}: use a world that factors (4, 6, 8, ...) "
                "with a fitting `mesh.shard`, or `sharding=fsdp`."
            )
