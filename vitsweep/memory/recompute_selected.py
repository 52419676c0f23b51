"""Keep what is dear to compute, and compute the cheap rest again."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitsweep.spec.technique import Memory

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class RecomputeSelected(Memory):
    """Selective checkpointing: products and attention are kept, norms and GELU computed again.

    The idea of arXiv:2205.05198 with today's roles: fused attention keeps no scores any more, so
    that the element-wise operations are what costs memory and little time. No product is repeated.
    """

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Run every block under a checkpoint that keeps products and attention."""
        from vitsweep.memory._checkpoint import SelectivelyRecomputedBlock
        from vitsweep.model.block import become

        return become(model, SelectivelyRecomputedBlock)
