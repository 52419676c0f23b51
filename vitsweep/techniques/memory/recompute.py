"""Keep all activations, or recompute some of them in the backward pass."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.attention_pattern import SOFTMAX, AttentionPattern
from vitsweep.spec.technique import Memory

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.spec.model_spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class KeepAll(Memory):
    """All activations that the backward pass reads are kept on the device."""


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
        from vitsweep.techniques.memory.checkpointed_blocks import RecomputedBlock

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


@dataclass(frozen=True, kw_only=True)
class RecomputeSelected(Memory):
    """Selective checkpointing: products and attention are kept, norms and GELU computed again.

    The idea of arXiv:2205.05198 with today's roles: fused attention keeps no scores any more, so
    that the element-wise operations are what costs memory and little time. No product is repeated.
    """

    wraps_blocks: ClassVar[bool] = True
    forwards_per_step: ClassVar[int] = 2

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse blocks that gather some of their own parameters while they run."""
        plan = cell.precision.plan()
        if cell.sharding.shards_parameters and plan.norm_dtype != plan.param_dtype:
            yield (
                f"`memory={self.name}` notes every operation of a block, and with `sharding="
                f"{cell.sharding.name}` and `precision={cell.precision.name}` these include the "
                f"gathering of {plan.norm_dtype} norms, which a recomputation does not repeat. Use "
                "`memory=recompute_blocks`, `precision=O1`, or `precision.keep_norm_fp32=false`."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Run every block under a checkpoint that keeps products and attention."""
        from vitsweep.model.block import swap_block_class
        from vitsweep.techniques.memory.checkpointed_blocks import SelectivelyRecomputedBlock

        return swap_block_class(model, SelectivelyRecomputedBlock)
