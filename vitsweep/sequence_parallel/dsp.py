"""Dynamic sequence parallelism: the sharded axis changes with the axis attended along."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.technique import SequenceParallel

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

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Two axes at least, and one of them free in every block."""
        if cell.model.num_sequence_axes < 2:
            yield (
                f"`sequence_parallel={self.name}` switches between the sequence axes of a model, "
                f"and `model={cell.model.name}` has one: use a `video_vit_*` or `axial_vit_*`, or "
                "`sequence_parallel=ulysses`."
            )

    def apply(self, model: "nn.Module", world: "World") -> "nn.Module":
        """Deal out tokens along the axis that the first block leaves free; switch between blocks."""
        from vitsweep.sequence_parallel._dsp import switch_between_blocks

        return switch_between_blocks(model, world.token_group())
