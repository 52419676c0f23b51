"""Patches left out in training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt, Lt

from vitsweep.spec.model_spec import TransformerSpec
from vitsweep.spec.model_variant import TokenVariant
from vitsweep.techniques.tokens.registers import one_axis_conflicts

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class DropTokens(TokenVariant):
    """Each image of a forward pass keeps a random subset of its patches.

    PatchDropout (Liu et al., arXiv:2208.07220); FLIP (Li et al., arXiv:2212.00794) does it to CLIP.
    The number of kept patches is fixed; which they are is drawn anew for each image. They know their
    position, which is added before; class token and registers stay. In evaluation nothing is
    dropped. Another training than a ViT's.

    Attributes:
        keep: share of the patches that go through the blocks.
    """

    keep: Annotated[float, Gt(0), Lt(1)]

    changes_model: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def kept(self, patches: int) -> int:
        """Return how many patches of an image go through the blocks; at least one."""
        return max(1, round(patches * self.keep))

    def shape(self, spec: TransformerSpec, cell: "CellSpec") -> TransformerSpec:
        """Return the shape with the number of patches that the blocks see."""
        return spec.with_kept_patches(self.kept(spec.num_patches(cell.batch.resolution_px)))

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse shares that keep no patch or all, and heads and methods that need every patch."""
        yield from super().conflicts(cell)
        yield from one_axis_conflicts(cell, self.name)
        spec = cell.transformer
        if spec.num_sequence_axes > 1:
            return
        me, patches = f"tokens={self.name}", spec.num_patches(cell.batch.resolution_px)
        kept = round(patches * self.keep)
        if patches and not 0 < kept < patches:
            yield (
                f"`tokens.keep={self.keep:g}` of {patches} patches keeps {kept}, and at least one must stay "
                "and one go: use `tokens.keep=0.5`, or `tokens=all`."
            )
        if cell.sequence_parallel.axes and cell.task.epochs:
            yield (
                f"`{me}` has fewer tokens in training than in the evaluation after `task.epochs="
                f"{cell.task.epochs}`, and `sequence_parallel={cell.sequence_parallel.name}` deals out "
                "one number of them: use `task=measure`, or `sequence_parallel=none`."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Drop patches after the embedding."""
        from vitsweep.model.initialize import drop_after_embedding

        return drop_after_embedding(model, self.kept)

    def plain_twin(self, model: "nn.Module") -> "nn.Module":
        """Draw the same, and pick the tokens of one image after the other."""
        from vitsweep.model.initialize import drop_after_embedding

        return drop_after_embedding(model, self.kept, image_by_image=True)
