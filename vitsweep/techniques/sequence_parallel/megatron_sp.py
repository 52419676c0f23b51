"""Megatron-SP: tensor parallelism whose norms and residuals are sharded by tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.model_parallel import SequenceParallel
from vitsweep.spec.rules import tensor_split_conflicts

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class MegatronSp(SequenceParallel):
    """Sequence parallelism with tensor parallelism (Korthikanti et al., arXiv:2205.05198).

    The matrices of each block are split over `mesh.tensor`; the same ranks share the tokens outside
    of them. Per block two all-gathers and two reduce-scatters of the activations forward, and as
    many backward: the gathered inputs are kept, where Megatron-LM gathers them a second time.
    """

    axes: ClassVar[tuple[str, ...]] = ("tensor",)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse `tensor_parallel` together with it: this technique splits the same matrices."""
        yield from tensor_split_conflicts(cell, f"sequence_parallel={self.name}")
        if cell.tensor_parallel.axes:
            yield (
                f"`sequence_parallel={self.name}` splits the matrices over `mesh.tensor` itself: "
                f"use `tensor_parallel=none` instead of `{cell.tensor_parallel.name}`."
            )

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Split the linears of every block, and the tokens outside of them."""
        from vitsweep.techniques.sequence_parallel.sharded_norms import shard_outside

        return shard_outside(model, world.axis("tensor").get_group())

    def complete_gradients(self, model: "nn.Module", world: "World") -> None:
        """Sum over the ranks what norms and biases outside the split matrices got from own tokens."""
        from vitsweep.techniques.sequence_parallel.sharded_norms import sum_over_tokens

        sum_over_tokens(model, world.axis("tensor").get_group())
