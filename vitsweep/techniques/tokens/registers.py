"""Learned tokens besides the patches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from vitsweep.spec.model_spec import TransformerSpec
from vitsweep.spec.model_variant import TokenVariant

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class Registers(TokenVariant):
    """More learned tokens that the head does not read (Darcet et al., arXiv:2309.16588).

    They come after the class token, without a position, and are there in evaluation too. They also
    let the number of tokens be chosen: 196 patches and a class token make 197, 3 registers more 200.
    Another model than a ViT.

    Attributes:
        count: of registers, besides those that the model has itself (`model.registers`).
    """

    count: Annotated[int, Gt(0)]

    changes_model: ClassVar[bool] = True

    def shape(self, spec: TransformerSpec, cell: "CellSpec") -> TransformerSpec:
        """Return the shape with more registers, which is how the model is built."""
        return spec.with_registers(self.count)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse models whose tokens are a grid."""
        yield from one_axis_conflicts(cell, self.name)


def one_axis_conflicts(cell: "CellSpec", name: str) -> Iterator[str]:
    """Refuse to add or drop tokens where they lie along two axes."""
    if cell.transformer.num_sequence_axes > 1:
        yield (
            f"`tokens={name}` changes the number of tokens, and those of `model={cell.model.name}` are a "
            "grid, along whose axes its blocks attend in turns: use a `vit_*`, or `tokens=all`."
        )
