"""The kinds of technique that change what is trained or evaluated: blocks, tokens, averages, epochs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from vitsweep.spec.technique import Technique

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.spec.model_spec import TransformerSpec


class ModelVariant(Technique):
    """Changes the shape of a model, or how it runs its blocks."""

    part_of_training = True

    draws: ClassVar[bool] = False
    """True where a forward pass in training makes random choices, those of `model.initialize`."""

    group: ClassVar[str]
    """The name of the group in `conf/`."""

    @property
    def least_images(self) -> int:
        """Images of a forward pass from which on the choice changes anything."""
        return 1

    @property
    def needs_transformer(self) -> bool:
        """All but the default choice."""
        return self.changes_model

    def shape(self, spec: "TransformerSpec", cell: "CellSpec") -> "TransformerSpec":
        """Return the shape of the model as `cell` trains it: parameters and FLOPs follow from it."""
        return spec

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse what random choices in each forward pass cannot go with."""
        if not self.draws:
            return
        me = f"{self.group}={self.name}"
        if cell.compilation.scope == "model":
            yield (
                f"`{me}` draws anew in each forward pass, from a generator of its own, which "
                f"`compilation={cell.compilation.name}` cannot hold in its graph: use "
                "`compilation=compile_blocks`, which is handed the draws."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Change the model in place, before any other technique sees it.

        Args:
            model: built from `shape`.
        """
        return model

    def plain_twin(self, model: "nn.Module") -> "nn.Module":
        """Do the same in one process, by slow reference code; without such code the record says so."""
        return self.apply(model) if self.changes_model else model


class BlockVariant(ModelVariant):
    """How the branches of a transformer block, attention and MLP, are put together.

    Itself the default choice: the pre-norm block of ViT (arXiv:2010.11929, eq. 2 and 3), on every image.
    """

    colour = 2

    group: ClassVar[str] = "vit_block"

    def kept(self, images: int) -> int:
        """Return how many of the images of a forward pass a branch computes; all by default."""
        return images


class TokenVariant(ModelVariant):
    """Which tokens go through the blocks in training; itself the default choice, all of them."""

    colour = 3

    group: ClassVar[str] = "tokens"


class Averaging(Technique):
    """A second copy of the weights, averaged over optimizer steps, which evaluation reads.

    Itself the default choice: no copy, evaluation reads the weights of the last step.
    """

    touches: ClassVar[tuple[str, ...]] = ("optimizer",)

    colour = 4
    part_of_training = True

    def build(self, weights: "list[Tensor]") -> Any:
        """Return a `techniques.averaging.ema.MovingAverage` of what this rank's optimizer updates, or None.

        Args:
            weights: float32 masters where there are any, shards and slices where they are split.
        """
        return None


class Schedule(Technique):
    """How large the images of an epoch are: those of the cell. The only choice; ids of cells contain it."""

    touches: ClassVar[tuple[str, ...]] = ()

    colour = 6
    part_of_training = True
