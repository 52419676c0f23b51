"""Dynamic sequence parallelism: the sharded axis changes with the axis attended along."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.model_parallel import SequenceParallel, axis_lengths, padded_share

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Dsp(SequenceParallel):
    """One all-to-all per change of axis (Zhao et al., arXiv:2403.10266, section 3).

    A block that attends along space finds its tokens sharded along time, and the other way round:
    attention itself sends nothing, and no head limits the degree. Axes that the degree does not
    divide are padded; attention never sees the padding.
    """

    axes: ClassVar[tuple[str, ...]] = ("sequence",)

    def tokens_per_rank(self, cell: "CellSpec") -> tuple[int, ...]:
        """A share of X in blocks that attend along Y, and of Y in those along X."""
        (x, y), ranks = axis_lengths(cell), cell.mesh.sequence_parallel_size
        even, odd = padded_share(x, ranks) * y, x * padded_share(y, ranks)
        return tuple(odd if block % 2 else even for block in range(cell.transformer.depth))

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse models whose tokens lie along one axis: there is nothing to switch to."""
        if cell.transformer.num_sequence_axes < 2:
            yield (
                f"`sequence_parallel={self.name}` switches between the sequence axes of a model, "
                f"and `model={cell.model.name}` has one: use a `video_vit_*`, `axial_vit_*` "
                "or `stdit_*`, or `sequence_parallel=ulysses`."
            )

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Shard the axis that the first block does not attend along; switch between blocks."""
        from vitsweep.techniques.sequence_parallel.token_sharding import switch_between_blocks

        return switch_between_blocks(model, world.token_group())
