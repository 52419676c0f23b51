"""Which modules FSDP2 gathers together, and in which dtype."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from vitsweep.errors import VitsweepError
from vitsweep.model.block import NORMS, layers_of
from vitsweep.spec.technique import PrecisionPlan

if TYPE_CHECKING:
    from vitsweep.techniques.sharding.fsdp import Fsdp


def shard_units(model: nn.Module, plan: PrecisionPlan, mesh: DeviceMesh, choice: "Fsdp") -> None:
    """Turn the parameters of `model` into shards over the last axis of `mesh`, in place.

    With master weights the shards *are* the masters: they stay float32 and are gathered in
    `plan.param_dtype`. Without, they have the dtype of the model already.

    Raises:
        VitsweepError: this version of torch lacks what is asked for.
    """
    reduced = choice.gradient_dtype or ("float32" if plan.master_weights else None)
    reduce_dtype = getattr(torch, reduced) if reduced else None
    policy = MixedPrecisionPolicy(param_dtype=_gather_dtype(plan), reduce_dtype=reduce_dtype)
    shards = mesh.size(mesh.ndim - 1)
    norms = [m for m in model.modules() if isinstance(m, NORMS)]
    whole = {p for norm in norms for p in norm.parameters()} if choice.whole_norms else None

    def placement(parameter: nn.Parameter) -> Shard | None:
        return _placement(parameter, shards)

    def shard(
        module: nn.Module | list[nn.Module], policy: MixedPrecisionPolicy, reshard: bool | int
    ) -> None:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=placement,
            ignored_params=whole,
        )

    if plan.norm_dtype != plan.param_dtype and not choice.whole_norms:
        for norm in norms:
            # tiny: regathering costs a message each
            shard(norm, MixedPrecisionPolicy(reduce_dtype=reduce_dtype), False)
    layers, size = list(layers_of(model)), choice.blocks_per_unit
    units = [layers[first : first + size] for first in range(0, len(layers), size)]
    for unit in units:
        shard(unit[0] if size == 1 else unit, policy, choice.reshard_after_forward)
    # the root's own parameters are used first and last: regathering them would gain nothing
    shard(model, policy, False)
    _prefetch([unit[0] for unit in units], choice.prefetch_forward, choice.prefetch_backward)
    if choice.symmetric_memory:
        _gather_from_symmetric_memory(model)


def parted_by_sharding(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a parameter group of the shards and one of the whole parameters, where it has any."""
    for sharded in (True, False):
        named = [
            (name, parameter)
            for name, parameter in zip(group["names"], group["params"], strict=True)
            if isinstance(parameter, DTensor) is sharded
        ]
        if named:
            names, parameters = zip(*named, strict=True)
            yield group | {"names": list(names), "params": list(parameters)}


def average_whole_gradients(model: nn.Module) -> None:
    """Average the gradients of parameters without shards over all ranks that hold shards: one message."""
    parameters = list(model.parameters())
    mesh = next(p.device_mesh for p in parameters if isinstance(p, DTensor))
    gradients = [p.grad for p in parameters if not isinstance(p, DTensor) and p.grad is not None]
    if not gradients or mesh.size() == 1:
        return
    joined = torch.cat([gradient.flatten() for gradient in gradients]).div_(mesh.size())
    for axis in range(mesh.ndim):
        dist.all_reduce(joined, group=mesh.get_group(axis))
    pieces = joined.split([gradient.numel() for gradient in gradients])
    for gradient, piece in zip(gradients, pieces, strict=True):
        gradient.copy_(piece.view_as(gradient))


def _prefetch(units: list[Any], forward: int, backward: int) -> None:
    """Let each unit gather the parameters of those that come after it in either pass."""
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + forward])
        if backward:
            unit.set_modules_to_backward_prefetch(units[max(0, index - backward) : index][::-1])


def _gather_from_symmetric_memory(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if not hasattr(module, "set_symm_mem_for_comm"):
                raise VitsweepError(
                    f"`sharding.symmetric_memory=true` needs a newer torch than {torch.__version__}, "
                    "whose FSDP2 cannot: use `sharding.symmetric_memory=false`."
                )
            module.set_symm_mem_for_comm()


def _gather_dtype(plan: PrecisionPlan) -> torch.dtype | None:
    return getattr(torch, plan.param_dtype) if plan.master_weights else None


def _placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Split (1, N, D) embeddings along D: FSDP2's dim 0 would leave all of it on the first rank."""
    if parameter.ndim == 3 and parameter.shape[0] == 1 and parameter.shape[2] % shards == 0:
        return Shard(2)
    return None
