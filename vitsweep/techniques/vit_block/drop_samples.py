"""Stochastic depth that computes only the images it keeps."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt, Lt

from vitsweep.spec.model_spec import TransformerSpec
from vitsweep.spec.model_variant import BlockVariant

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class DropSamples(BlockVariant):
    """Each branch of each block sees a random subset of the images of a forward pass.

    Stochastic depth (Huang et al., arXiv:1603.09382) as DINOv2 trains with it (arXiv:2304.07193,
    section 5, "efficient stochastic depth"): the kept images are gathered, computed, scaled by
    images / kept, and added to the residual stream. Not computed is not paid for: nearly `rate` of
    the step, where stochastic depth computes all and multiplies by zero. The number of kept
    images is fixed, so that all ranks do the same work; which they are is drawn anew for attention
    and MLP of each block. In evaluation nothing is dropped. Another training than a ViT's.

    Attributes:
        rate: share of the images that a branch leaves out, the same in all blocks.
    """

    rate: Annotated[float, Gt(0), Lt(1)]

    changes_model: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    @property
    def least_images(self) -> int:
        """So many that one is dropped and one kept."""
        return max(2, ceil(0.5 / self.rate) + 1, ceil(0.5 / (1 - self.rate)) + 1)

    def kept(self, images: int) -> int:
        """Return how many of the images of a forward pass a branch computes; at least one."""
        return max(1, round(images * (1 - self.rate)))

    def shape(self, spec: TransformerSpec, cell: "CellSpec") -> TransformerSpec:
        """Return the shape with the share of images that blocks compute."""
        images = cell.images_per_forward
        return replace(spec, computed_images=(self.kept(images), images))

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse batches of which nothing or all would be dropped, and what cannot draw anew."""
        yield from super().conflicts(cell)
        me, images = f"vit_block={self.name}", cell.images_per_forward
        if round(images * (1 - self.rate)) in (0, images):
            least = -(-self.least_images * cell.images_per_step // images)
            yield (
                f"`vit_block.rate={self.rate:g}` of the {images} images of a forward pass drops none or all: "
                f"use at least `batch.images_per_step={least}`, or another `vit_block.rate`."
            )
        if cell.transformer.num_sequence_axes > 1:
            yield (
                f"`{me}` drops whole images, and a block of `model={cell.model.name}` sees the rows or "
                "frames of an image as a batch: use a `vit_*`, or `vit_block=plain`."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Let the model draw, and its blocks compute the drawn images."""
        from vitsweep.techniques.vit_block.branches import with_dropped_samples

        return with_dropped_samples(model, self.kept)

    def plain_twin(self, model: "nn.Module") -> "nn.Module":
        """Draw the same, and decide for one image after the other whether it is computed."""
        from vitsweep.techniques.vit_block.branches import with_dropped_samples

        return with_dropped_samples(model, self.kept, image_by_image=True)
