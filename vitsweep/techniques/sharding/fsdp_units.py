"""Which modules FSDP2 gathers together, and in which dtype."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from vitsweep.model.layer import NORMS, layers_of
from vitsweep.spec.technique import PrecisionPlan


def shard_units(
    model: nn.Module, plan: PrecisionPlan, mesh: DeviceMesh, reshard_after_forward: bool
) -> None:
    """Turn the parameters of `model` into shards over the last axis of `mesh`, in place.

    With master weights the shards *are* the masters: they stay float32 and are gathered in
    `plan.param_dtype`. Without, they have the dtype of the model already.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=_gather_dtype(plan), reduce_dtype=torch.float32 if plan.master_weights else None
    )
    shards = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard | None:
        return _placement(parameter, shards)

    def shard(module: nn.Module, policy: MixedPrecisionPolicy, reshard: bool) -> None:
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=placement,
        )

    if plan.norm_dtype != plan.param_dtype:
        for norm in [m for m in model.modules() if isinstance(m, NORMS)]:
            shard(norm, MixedPrecisionPolicy(), False)  # tiny: regathering costs a message each
    for layer in layers_of(model):
        shard(layer, policy, reshard_after_forward)
    # the root's own parameters are used first and last: regathering them would gain nothing
    shard(model, policy, False)


def _gather_dtype(plan: PrecisionPlan) -> torch.dtype | None:
    return getattr(torch, plan.param_dtype) if plan.master_weights else None


def _placement(parameter: nn.Parameter, shards: int) -> Shard | None:
    """Split (1, N, D) embeddings along D: FSDP2's dim 0 would leave all of it on the first rank."""
    if parameter.ndim == 3 and parameter.shape[0] == 1 and parameter.shape[2] % shards == 0:
        return Shard(2)
    return None
