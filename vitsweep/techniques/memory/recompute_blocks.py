"""Keep the input of each block and compute the rest again."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.attention_pattern import SOFTMAX, AttentionPattern
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

    wraps_blocks: ClassVar[bool] = True
    forwards_per_step: ClassVar[int] = 2

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Run every block under a checkpoint."""
        from vitsweep.model.block import swap_block_class
        from vitsweep.techniques.memory._checkpoint import RecomputedBlock

        return swap_block_class(model, RecomputedBlock)

    def recomputed_flops(
        self,
        spec: "ModelSpec",
        resolution_px: int,
        pooling: Literal["token", "mean"],
        attention_pattern: AttentionPattern = SOFTMAX,
    ) -> int:
        """Count every product of a block but its last."""
        from vitsweep.model.flops import recomputed_block_flops

        return recomputed_block_flops(spec, resolution_px, pooling, attention_pattern)
