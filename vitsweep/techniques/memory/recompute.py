"""Keep all activations, or recompute some of them in the backward pass."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.technique import Memory

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


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
        from vitsweep.techniques.memory.checkpointed_blocks import recomputed

        return recomputed(model)


@dataclass(frozen=True, kw_only=True)
class RecomputeSelected(RecomputeBlocks):
    """Selective checkpointing: products and attention are kept, norms and GELU computed again.

    The idea of arXiv:2205.05198 with today's roles: fused attention keeps no scores any more, so
    that the element-wise operations are what costs memory and little time. With products and attention
    kept, no product is repeated.

    Attributes:
        keep: kinds of operations whose results are kept; all others are computed again. `linear` are the
            products with weights, `attention` the fused kernel or its two products.
    """

    keep: tuple[Literal["linear", "attention", "norm", "activation"], ...]

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
        """Run every block under a checkpoint that keeps some results."""
        from vitsweep.techniques.memory.checkpointed_blocks import recomputed

        return recomputed(model, frozenset(self.keep))
