"""ZeRO stage 1 (Rajbhandari et al., arXiv:1910.02054): each rank keeps a share of optimizer state."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vitsweep.techniques.sharding.ddp import Ddp

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Zero1(Ddp):
    """DDP, with the optimizer state partitioned over the replicas.

    Each rank updates its own parameters and broadcasts them (torch's ZeroRedundancyOptimizer).
    """

    deals_out_whole_tensors: ClassVar[bool] = True

    def build_optimizer(
        self,
        build: "Callable[[list[dict[str, Any]]], Optimizer]",
        groups: list[dict[str, Any]],
        world: "World",
    ) -> "Optimizer":
        """Give every rank an optimizer over its share of the parameters."""
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(
            groups,
            optimizer_class=lambda params, **_: build(params),  # type: ignore[arg-type]
            process_group=world.gradient_group(),
        )
