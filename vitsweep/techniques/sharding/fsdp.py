"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer state in shards."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from annotated_types import Ge, Gt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import PrecisionPlan, Sharding
from vitsweep.techniques.sharding.half_gradients import HALF_GRADIENTS, half_gradient_conflicts

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Fsdp(Sharding):
    """`fully_shard` on every block and on the root.

    Attributes:
        reshard_after_forward: True frees a unit's gathered parameters between forward and
            backward (ZeRO-3, `fsdp`); False keeps them until backward has used them (`zero2`); a number
            keeps parts for groups of so many ranks, such as those of a node, so that the backward pass
            gathers within them (ZeRO++'s hpZ, arXiv:2306.10209).
        blocks_per_unit: blocks that are gathered together; fewer and larger messages, more memory.
        prefetch_forward: units whose parameters are gathered ahead in the forward pass; 0 leaves it to
            FSDP2, which begins to gather a unit when the host reaches it.
        prefetch_backward: the same in the backward pass, where 0 gathers one unit ahead.
        gradient_dtype: in which gradients are reduced; None as the precision says, which is float32 unless
            parameters and gradients are half precision throughout.
        whole_norms: every rank keeps the norms whole, which are thousands of numbers among millions; their
            gradients are averaged in one message after the backward pass.
        symmetric_memory: NCCL gathers from memory that all ranks of a node map (cuda).
    """

    reshard_after_forward: bool | Annotated[int, Gt(1)]
    blocks_per_unit: Annotated[int, Gt(0)]
    prefetch_forward: Annotated[int, Ge(0)]
    prefetch_backward: Annotated[int, Ge(0)]
    gradient_dtype: Literal["bfloat16"] | None
    whole_norms: bool
    symmetric_memory: bool

    axes: ClassVar[tuple[str, ...]] = ("shard",)
    shards_parameters: ClassVar[bool] = True

    def apply(self, model: "nn.Module", plan: PrecisionPlan, world: "World") -> "nn.Module":
        """Shard blocks, then the rest; float32 norms inside a half model form units of their own."""
        from vitsweep.techniques.sharding.fsdp_units import shard_units

        shard_units(model, plan, self.mesh(world), self)
        return model

    def relative_tolerance(self) -> float:
        """Gradients in bfloat16 keep 8 bits of mantissa."""
        return HALF_GRADIENTS if self.gradient_dtype else 0.0

    def optimizer_groups(
        self, groups: list[dict[str, Any]], stages: "list[nn.Module]"
    ) -> list[dict[str, Any]]:
        """Part shards from whole parameters, which no list of an optimizer may mix."""
        if not self.whole_norms:
            return groups
        from vitsweep.techniques.sharding.fsdp_units import parted_by_sharding

        return [part for group in groups for part in parted_by_sharding(group)]

    def complete_gradients(self, model: "nn.Module") -> None:
        """Average the gradients of parameters that are not sharded."""
        if self.whole_norms:
            from vitsweep.techniques.sharding.fsdp_units import average_whole_gradients

            average_whole_gradients(model)

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
        """Refuse several copies of the state (that is HSDP), and what units cannot be."""
        yield from self.unit_conflicts(cell)
        if cell.mesh.replicate > 1:
            yield (
                f"`sharding={self.name}` spreads one copy of the state over all replicas, but "
                f"`mesh.shard={cell.mesh.shard}` leaves {cell.mesh.replicate} copies: use "
                "`mesh.shard=auto`, or `sharding=hsdp`."
            )

    def unit_conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Yield what is wrong with the settings of units."""
        ranks, shards = self.reshard_after_forward, cell.mesh.state_shards
        if not isinstance(ranks, bool) and (ranks >= shards or shards % ranks):
            fitting = [d for d in range(2, shards) if shards % d == 0]
            ways_out = [f"`sharding.reshard_after_forward={d}`" for d in fitting or ("true",)]
            yield (
                f"`sharding.reshard_after_forward={ranks}` must divide the {shards} shards of a copy, and "
                f"be less: use {' or '.join(ways_out)}."
            )
        depth = getattr(cell.model, "depth", None)
        if depth is not None and self.blocks_per_unit > depth:
            yield (
                f"`sharding.blocks_per_unit={self.blocks_per_unit}` is more than the `model.depth={depth}` "
                f"blocks that there are: use at most `sharding.blocks_per_unit={depth}`."
            )
        yield from self._prefetch_conflicts(depth)
        if self.symmetric_memory and cell.resources.device == "cpu":
            yield (
                "`sharding.symmetric_memory=true` needs `resources.device=cuda`, since NCCL gathers from "
                "it; got cpu. Use `sharding.symmetric_memory=false`."
            )
        if self.whole_norms:
            yield from self._norm_conflicts(cell)
        if self.gradient_dtype is not None:
            yield from half_gradient_conflicts(self, self.gradient_dtype, cell)

    def _norm_conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse whole norms in half precision, and gradients of theirs that are scaled."""
        plan, precision = cell.precision.plan(), cell.precision.name
        if plan.norm_dtype in ("float16", "bfloat16"):
            yield (
                "`sharding.whole_norms=true` keeps norms in float32 beside shards, and "
                f"`precision={precision}` has them in {plan.norm_dtype}: use `precision=bf16`, or "
                "`sharding.whole_norms=false`."
            )
        if plan.loss_scale and not cell.optimizer.elementwise:
            yield (
                f"`sharding.whole_norms=true` has `optimizer={cell.optimizer.name}` update whole norms "
                f"beside shards, whose gradients torch cannot unscale together (`precision.loss_scale="
                f"{plan.loss_scale}`): use `precision.loss_scale=null`, `optimizer=adamw_fused`, or "
                "`sharding.whole_norms=false`."
            )

    def _prefetch_conflicts(self, depth: int | None) -> Iterator[str]:
        """Refuse more units than come after the first one."""
        if depth is None:
            return
        units = -(-depth // self.blocks_per_unit)
        for key in ("prefetch_forward", "prefetch_backward"):
            ahead = getattr(self, key)
            if ahead >= max(1, units):
                yield (
                    f"`sharding.{key}={ahead}` gathers more units ahead than follow the first of the "
                    f"{units} (`model.depth={depth}`, `sharding.blocks_per_unit={self.blocks_per_unit}`): "
                    f"use at most `sharding.{key}={units - 1}`."
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
        yield from self.unit_conflicts(cell)
        mesh = cell.mesh
        if mesh.replicate == 1 or mesh.state_shards == 1:
            yield (
                f"`sharding={self.name}` needs at least 2 replicas of at least 2 shards; "
                f"`mesh.shard={mesh.shard}` over {mesh.gradient_shares} ranks "
                f"gives {mesh.replicate} x {mesh.state_shards}: use a world that factors (4, 6, 8, ...) "
                "with a fitting `mesh.shard`, or `sharding=fsdp`."
            )
