"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer state in shards."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from annotated_types import Ge, Gt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import PrecisionPlan, Sharding
from vitsweep.techniques.sharding.ddp import HALF_GRADIENTS, half_gradient_conflicts
from vitsweep.torch_compat import is_older_than

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import Shard

    from vitsweep.techniques.sharding.fsdp_units import Units
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Fsdp(Sharding):
    """`fully_shard` on every block and on the root.

    Attributes:
        reshard_after_forward: True frees a unit's gathered parameters between forward and
            backward (ZeRO-3, `fsdp`); False keeps them until backward has used them (`zero2`); a number
            keeps parts for groups of so many ranks, such as those of a node, so that the backward pass
            gathers within them (ZeRO++'s hpZ, arXiv:2306.10209). The stages of a pipeline keep them in any
            case, from the forward pass of the first micro-batch to the backward pass of the last, as in
            torchtitan: each micro-batch would gather them twice.
        blocks_per_unit: blocks that are gathered together; fewer and larger messages, more memory.
        prefetch_forward: units whose parameters are gathered ahead in the forward pass; 0 leaves it to
            FSDP2, which begins to gather a unit when the host reaches it.
        prefetch_backward: the same in the backward pass, where 0 gathers one unit ahead.
        gradient_dtype: in which gradients are reduced; None as the precision says, which is float32 unless
            parameters and gradients are half precision throughout.
        whole_norms: False, as `symmetric_memory`; they keep the ids of cells from when both could be chosen.
    """

    reshard_after_forward: bool | Annotated[int, Gt(1)]
    blocks_per_unit: Annotated[int, Gt(0)]
    prefetch_forward: Annotated[int, Ge(0)]
    prefetch_backward: Annotated[int, Ge(0)]
    gradient_dtype: Literal["bfloat16"] | None
    whole_norms: Literal[False] = False
    symmetric_memory: Literal[False] = False

    axes: ClassVar[tuple[str, ...]] = ("shard",)
    shards_parameters: ClassVar[bool] = True

    def apply(self, model: "nn.Module", plan: PrecisionPlan, world: "World") -> "nn.Module":
        """Shard blocks, then the rest; float32 norms inside a half model form units of their own."""
        is_stage = world.shape.pipeline > 1
        own = replace(self, reshard_after_forward=False) if is_stage else self
        shard_units(model, plan, self.mesh(world), own)
        if getattr(model, "may_lack_gradients", False):
            from vitsweep.techniques.sharding.fsdp_units import Units

            vars(model)["units"] = Units(model, self.name, world)
        return model

    def relative_tolerance(self) -> float:
        """Gradients in bfloat16 keep 8 bits of mantissa."""
        return HALF_GRADIENTS if self.gradient_dtype else 0.0

    def drop_gradients(self, model: "nn.Module") -> None:
        """End a backward pass without an exchange, and drop its gradients (private to torch).

        One rank alone may call it.
        """
        from torch.distributed.fsdp import FSDPModule

        root: Any = cast("FSDPModule", model)._get_fsdp_state()
        if hasattr(model, "reset_iter_state"):  # from torch 2.13 on
            cast("FSDPModule", model).reset_iter_state()
        elif root._state_ctx.post_backward_final_callback_queued:
            cast("FSDPModule", model).set_requires_gradient_sync(False)  # as of a micro-batch
            with suppress(AttributeError):  # of a unit that was never gathered
                root._root_post_backward_final_callback()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                group = module._get_fsdp_state()._fsdp_param_group
                for parameter in group.fsdp_params if group else ():
                    parameter.unsharded_accumulated_grad = None
                    if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
                        whole.grad = None

    def mesh(self, world: "World") -> "DeviceMesh":
        """Return the mesh over which one copy of the state is spread."""
        return world.state_mesh(replicated=False)

    def gradient_sync(
        self, model: "nn.Module", is_last_micro_batch: bool
    ) -> AbstractContextManager[None]:
        """Reduce-scatter gradients on the last micro-batch only."""
        cast("FSDPModule", model).set_requires_gradient_sync(is_last_micro_batch)
        units = _units(model)
        return units.micro_batch() if units else nullcontext()

    def complete_gradients(self, model: "nn.Module") -> None:
        """Drop the zeros that stand for gradients which no rank had."""
        if units := _units(model):
            units.drop_zeros()

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
        if self.gradient_dtype is not None:
            yield from half_gradient_conflicts(self, self.gradient_dtype, cell)


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


def _units(model: "nn.Module") -> "Units | None":
    """Return what watches the units of a user's module; nothing watches ours."""
    units: Units | None = vars(model).get("units")
    return units


def shard_units(
    model: "nn.Module", plan: PrecisionPlan, mesh: "DeviceMesh", choice: "Fsdp"
) -> None:
    """Turn the parameters of `model` into shards over the last axis of `mesh`, in place.

    With master weights the shards *are* the masters: they stay float32 and are gathered in
    `plan.param_dtype`. Without, they have the dtype of the model already.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from vitsweep.model.block import NORMS, blocks_of

    _keep_shards_in_place()
    reduced = choice.gradient_dtype or ("float32" if plan.master_weights else None)
    reduce_dtype = getattr(torch, reduced) if reduced else None
    policy = MixedPrecisionPolicy(param_dtype=_gather_dtype(plan), reduce_dtype=reduce_dtype)
    placement = partial(_placement, shards=mesh.size(mesh.ndim - 1))
    shard: Any = partial(fully_shard, mesh=mesh, shard_placement_fn=placement)
    if plan.norm_dtype != plan.param_dtype:
        for norm in [m for m in model.modules() if isinstance(m, NORMS)]:
            own = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
            # tiny: regathering costs a message each
            shard(norm, mp_policy=own, reshard_after_forward=False)
    layers, size = list(blocks_of(model)), choice.blocks_per_unit
    units = [layers[first : first + size] for first in range(0, len(layers), size)]
    for unit in units:
        modules = unit[0] if size == 1 else unit
        shard(modules, mp_policy=policy, reshard_after_forward=choice.reshard_after_forward)
    model.register_forward_hook(_without_views)  # before FSDP's own hook
    # the root's own parameters are used first and last: regathering them would gain nothing
    shard(model, mp_policy=policy, reshard_after_forward=False)
    _prefetch([unit[0] for unit in units], choice.prefetch_forward, choice.prefetch_backward)


def _keep_shards_in_place() -> None:
    """Let FSDP2 of torch 2.9 leave shards where they are, as it does from 2.10 on.

    Before the first forward pass it copied each shard that is shorter than the longest to other memory, and
    what held the shards, such as an optimizer, went on with memory that nobody reads.
    """
    if not is_older_than("2.10"):
        return
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    reset = FSDPParam.reset_sharded_param
    if reset.__name__ == "reset_if_moved":
        return

    def reset_if_moved(self: Any) -> None:
        here = getattr(self._module_info.module, self._module_info.param_name)
        kept, now = self._sharded_param_data, here._local_tensor
        same = (
            not now.is_meta
            and kept.untyped_storage().data_ptr() == now.untyped_storage().data_ptr()
        )
        if here is not self.sharded_param or not same:
            reset(self)

    FSDPParam.reset_sharded_param = reset_if_moved  # type: ignore[method-assign]


def _without_views(module: "nn.Module", inputs: Any, outputs: Any) -> Any:
    """Copy what the model returns as views, such as `x[:, 0]`.

    FSDP begins its backward pass in a hook on these outputs. An in-place operation of a loss on a view
    would drop the hook, of which torch warns.
    """
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda t: t.clone() if t._base is not None else t, outputs)


def _prefetch(units: list[Any], forward: int, backward: int) -> None:
    """Let each unit gather the parameters of those that come after it in either pass."""
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + forward])
        if backward:
            unit.set_modules_to_backward_prefetch(units[max(0, index - backward) : index][::-1])


def _gather_dtype(plan: PrecisionPlan) -> "torch.dtype | None":
    import torch

    return getattr(torch, plan.param_dtype) if plan.master_weights else None


def _placement(parameter: "nn.Parameter", shards: int) -> "Shard | None":
    """Split (1, N, D) embeddings along D: FSDP2's dim 0 would leave all of it on the first rank."""
    from torch.distributed.tensor import Shard

    if parameter.ndim == 3 and parameter.shape[0] == 1 and parameter.shape[2] % shards == 0:
        return Shard(2)
    return None
