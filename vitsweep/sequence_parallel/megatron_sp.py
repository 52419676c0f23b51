"""Megatron-SP: tensor parallelism whose norms and residuals are sharded by tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.split_reasons import split_reasons
from vitsweep.spec.technique import SequenceParallel

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
        """It splits the matrices itself."""
        yield from split_reasons(cell, f"sequence_parallel={self.name}")
        if cell.tensor_parallel.name != "none":
            yield (
                f"`sequence_parallel={self.name}` splits the matrices over `mesh.tensor` itself: "
                f"use `tensor_parallel=none` instead of `{cell.tensor_parallel.name}`."
            )

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Split the linears of every block, and the tokens outside of them."""
        from vitsweep.sequence_parallel._megatron_sp import shard_outside

        return shard_outside(model, world.axis("tensor").get_group())
