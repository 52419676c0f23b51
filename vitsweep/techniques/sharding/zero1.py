"""ZeRO stage 1 (Rajbhandari et al., arXiv:1910.02054): each rank keeps a share of optimizer state."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from annotated_types import Gt

from vitsweep.spec.technique import PrecisionPlan, Sharding

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitsweep.techniques.sharding.zero1_buckets import ShardedReplica
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Zero1(Sharding):
    """Replicas, with the optimizer state (master weights included) partitioned over them.

    Gradients are reduce-scattered instead of all-reduced, each rank updates its part of every
    bucket, and the updated parameters are all-gathered: per step a rank sends 2 (n-1)/n P, as much
    as DDP (section 7.2.1 of the paper).

    Attributes:
        bucket_mib: gradients are exchanged in buckets of this size.
    """

    bucket_mib: Annotated[float, Gt(0)]

    shards_optimizer: ClassVar[bool] = True

    def apply(self, model: "nn.Module", plan: PrecisionPlan, world: "World") -> "nn.Module":
        """Wrap the model."""
        import torch.distributed as dist

        from vitsweep.techniques.sharding.zero1_buckets import ShardedReplica

        group = (world.gradient_group() or dist.group.WORLD) if dist.is_initialized() else None
        return ShardedReplica(model, group, self.bucket_mib)

    def gradient_sync(
        self, model: "nn.Module", is_last_micro_batch: bool
    ) -> AbstractContextManager[None]:
        """Send gradients during the last micro-batch's backward pass."""
        return cast("ShardedReplica", model).exchanging(is_last_micro_batch)

    def optimizer_groups(
        self, groups: list[dict[str, Any]], stages: "list[nn.Module]"
    ) -> list[dict[str, Any]]:
        """Replace parameters by this rank's slices of them."""
        pieces = {
            parameter: piece
            for replica in _replicas(stages)
            for bucket in replica.buckets
            for parameter, piece in bucket.pieces.items()
        }
        held = []
        for group in groups:
            names = zip(group["names"], group["params"], strict=True)
            own = {name: pieces[p] for name, p in names if p in pieces}
            held.append(group | {"params": list(own.values()), "names": list(own)})
        return held

    def complete_gradients(self, model: "nn.Module") -> None:
        """Wait until every slice has its mean gradient."""
        for replica in _replicas([model]):
            replica.complete_gradients()

    def complete_update(self, model: "nn.Module") -> None:
        """Gather the updated parameters."""
        for replica in _replicas([model]):
            replica.gather_parameters()

    def gradient_of(
        self,
        model: "nn.Module",
        parameter: "nn.Parameter",
        held: "Callable[[nn.Parameter], Tensor | None]",
    ) -> "Tensor | None":
        """Join the gradients of a parameter's slices."""
        for replica in _replicas([model]):
            for bucket in replica.buckets:
                if any(parameter is each for each in bucket.parameters):
                    parts = {p: held(piece) for p, piece in bucket.pieces.items()}
                    return bucket.whole(parameter, cast("dict[nn.Parameter, Tensor]", parts))
        return None


def _replicas(modules: "list[nn.Module]") -> "Iterator[ShardedReplica]":
    from vitsweep.techniques.sharding.zero1_buckets import ShardedReplica

    for module in modules:
        yield from (m for m in module.modules() if isinstance(m, ShardedReplica))
