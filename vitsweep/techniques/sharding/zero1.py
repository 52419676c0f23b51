"""ZeRO stage 1 (Rajbhandari et al., arXiv:1910.02054): each rank keeps a share of optimizer state."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from vitsweep.spec.technique import PrecisionPlan
from vitsweep.techniques.sharding.ddp import BucketedReplicas

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitsweep.techniques.sharding.zero1_buckets import ShardedReplica
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Zero1(BucketedReplicas):
    """Replicas, with the optimizer state (master weights included) partitioned over them.

    Gradients are reduce-scattered instead of all-reduced, each rank updates its part of every
    bucket, and the updated parameters are all-gathered: per step a rank sends 2 (n-1)/n P, as much
    as DDP (section 7.2.1 of the paper).
    """

    shards_optimizer: ClassVar[bool] = True

    def apply(self, model: "nn.Module", plan: PrecisionPlan, world: "World") -> "nn.Module":
        """Wrap the model."""
        import torch
        import torch.distributed as dist

        from vitsweep.techniques.sharding.zero1_buckets import ShardedReplica

        group = (world.gradient_group() or dist.group.WORLD) if dist.is_initialized() else None
        dtype = getattr(torch, self.gradient_dtype) if self.gradient_dtype else None
        return ShardedReplica(model, group, self.bucket_mib, dtype)

    def gradient_sync(
        self, model: "nn.Module", is_last_micro_batch: bool
    ) -> AbstractContextManager[None]:
        """Send gradients during the last micro-batch's backward pass."""
        return cast("ShardedReplica", model).exchanging(is_last_micro_batch)

    def optimizer_groups(
        self, groups: list[dict[str, Any]], model: "nn.Module"
    ) -> list[dict[str, Any]]:
        """Replace parameters by this rank's slices of them.

        `starts` says where each begins, `parts` what each rank has of every parameter.
        """
        buckets = [bucket for replica in _replicas(model) for bucket in replica.buckets]
        pieces = {
            parameter: (piece, bucket.first_number(parameter))
            for bucket in buckets
            for parameter, piece in bucket.pieces.items()
        }
        parts = {p: bucket.parts(p) for bucket in buckets for p in bucket.parameters}
        held = []
        for group in groups:
            named = [*zip(group["names"], group["params"], strict=True)]
            own = [(name, *pieces[p]) for name, p in named if p in pieces]
            held.append(
                group
                | {
                    "params": [piece for _, piece, _ in own],
                    "names": [name for name, _, _ in own],
                    "starts": [start for _, _, start in own],
                    "parts": {name: parts[p] for name, p in named},
                }
            )
        return held

    def complete_gradients(self, model: "nn.Module") -> None:
        """Wait until every slice has its mean gradient."""
        for replica in _replicas(model):
            replica.complete_gradients()

    def drop_gradients(self, model: "nn.Module") -> None:
        """Drop gradients in buckets, also those that are on their way."""
        for replica in _replicas(model):
            replica.drop_gradients()

    def complete_update(self, model: "nn.Module") -> None:
        """Gather the updated parameters."""
        for replica in _replicas(model):
            for work in [bucket.start_gather() for bucket in replica.buckets]:
                if work is not None:
                    work.wait()

    def gradient_of(
        self,
        model: "nn.Module",
        parameter: "nn.Parameter",
        held: "Callable[[nn.Parameter], Tensor | None]",
    ) -> "Tensor | None":
        """Join the gradients of a parameter's slices."""
        for replica in _replicas(model):
            for bucket in replica.buckets:
                if any(parameter is each for each in bucket.parameters):
                    return bucket.whole(parameter, {p: held(o) for p, o in bucket.pieces.items()})
        return None

    def skips(self, model: "nn.Module", parameter: "nn.Parameter") -> bool:
        """Parameters that the loss does not depend on keep their value, as under DDP."""
        return any(parameter in replica.unused for replica in _replicas(model))


def _replicas(model: "nn.Module") -> "Iterator[ShardedReplica]":
    from vitsweep.techniques.sharding.zero1_buckets import ShardedReplica

    return (m for m in model.modules() if isinstance(m, ShardedReplica))
