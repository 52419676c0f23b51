"""Keep the input of each block and compute the rest again."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vitsweep.spec.attending import SOFTMAX, Attending
from vitsweep.spec.technique import Memory

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class RecomputeBlocks(Memory):
    """Activation checkpointing of every block (arXiv:1604.06174), non-reentrant.

    Memory of activations falls to one (B, T, D) per block and the insides of one block, for almost
    another forward pass.
    """

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Run every block under a checkpoint."""
        from vitsweep.memory._checkpoint import RecomputedBlock
        from vitsweep.model.block import become

        return become(model, RecomputedBlock)

    def recomputed_flops(
        self,
        spec: "ModelSpec",
        resolution_px: int,
        pooling: Literal["token", "mean"],
        attending: Attending = SOFTMAX,
    ) -> int:
        """Count every product of a block but its last."""
        from vitsweep.model.flops import recomputed_block_flops

        return recomputed_block_flops(spec, resolution_px, pooling, attending)
