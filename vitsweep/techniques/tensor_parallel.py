"""Tensor parallelism: whole matrices on every rank, or Megatron's split."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.model_parallel import TensorParallel
from vitsweep.spec.rules import tensor_split_conflicts

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Megatron(TensorParallel):
    """qkv and `up` split by columns, `out` and `down` by rows (Shoeybi et al., arXiv:1909.08053).

    Two all-reduces of the activations per block forward and two backward. Norms, embedding and head
    are replicated. Written by hand rather than with DTensor: parameters stay plain
    tensors, which every sharding and optimizer takes.
    """

    axes: ClassVar[tuple[str, ...]] = ("tensor",)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse degrees that do not divide the heads and the MLP."""
        yield from tensor_split_conflicts(cell, f"tensor_parallel={self.name}")

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Split the linears of every block."""
        from vitsweep.model.block import split_replicated

        return split_replicated(model, world.axis("tensor").get_group())
