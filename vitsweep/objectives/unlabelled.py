"""Training an image ViT without labels: what it refuses, and views of an image."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from vitsweep.spec.model_spec import ViTSpec
from vitsweep.spec.objective import Objective, Pass

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class OfImageViT(Objective):
    """An objective whose steps run an image ViT on tokens of several lengths.

    Attributes:
        probe_images: held-out images that a linear probe of the features is fitted to; None for a half.
    """

    scores: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {
        "held_out_loss": "lower",
        "probe_top1": "higher",
        "feature_spread": "higher",
    }

    probe_images: Annotated[int, Gt(1)] | None

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse other models, and techniques that know one length or one stack."""
        yield from super().conflicts(cell)
        typed = f"`objective={self.name}`"
        if not isinstance(cell.model, ViTSpec):
            yield (
                f"{typed} sends tokens of several lengths through the blocks of an image ViT, which "
                f"`model={cell.model.name}` is not: use a `model=vit_*`."
            )
        for group, plain in (
            ("sequence_parallel", "none"),
            ("vit_block", "plain"),
            ("tokens", "all"),
        ):
            if (name := getattr(cell, group).name) != plain:
                yield (
                    f"`{group}={name}` works on tokens of one length, and {typed} has several in a step: use "
                    f"`{group}={plain}`."
                )
        if cell.precision.float8:
            yield (
                f"`precision={cell.precision.name}` needs rows in multiples of {cell.precision.multiple}, "
                f"which {typed} does not keep: use another `precision`."
            )
        if cell.recipe.drop_path and cell.task.epochs:
            yield (
                f"`recipe.drop_path={cell.recipe.drop_path:g}` draws for one forward pass of one length, and "
                f"{typed} has several: use `recipe.drop_path=0`."
            )


@dataclass(frozen=True, kw_only=True)
class OfViews(OfImageViT):
    """An objective on crops of each image, which are drawn anew in each step.

    A crop has a random area, a random ratio of its sides from 3/4 to 4/3 and a random place, and is resized
    bilinearly: large ones to `batch.resolution_px`, small ones to a share of that.

    Attributes:
        small_views: small crops of an image; besides 2 large ones.
        small_side: of their side in that of large ones, rounded to whole patches: 96 of 224 px.
        least_area: of a small crop, as a share of the image.
        between_area: small crops have less, large ones more.
        flips: half of the crops are mirrored, left for right.
    """

    couples_images: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    large_views: ClassVar[int] = 2

    small_views: Annotated[int, Ge(0)]
    small_side: Annotated[float, Gt(0), Lt(1)]
    least_area: Annotated[float, Gt(0), Lt(1)]
    between_area: Annotated[float, Gt(0), Lt(1)]
    flips: bool

    def small_px(self, cell: "CellSpec") -> int:
        """Return the side of a small crop in pixels."""
        assert isinstance(cell.model, ViTSpec)
        patch = cell.model.patch_px
        return max(1, round(self.small_side * cell.batch.resolution_px / patch)) * patch

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse areas in the wrong order, and matrices split over ranks in few digits."""
        yield from super().conflicts(cell)
        plan = cell.precision.plan()
        dtype = plan.autocast_dtype or plan.param_dtype
        if cell.mesh.tensor > 1 and (plan.tf32 or dtype not in ("float32", "float64")):
            yield (
                f"`tensor_parallel={cell.tensor_parallel.name}` rounds partial sums to the digits of "
                f"`precision={cell.precision.name}`, and `objective={self.name}` compares views that hardly "
                "differ: use `precision=fp32`, or `tensor_parallel=none`."
            )
        if self.least_area > self.between_area:
            yield (
                f"`objective.least_area={self.least_area:g}` is more than `objective.between_area="
                f"{self.between_area:g}`, the most that a small crop has: use less."
            )

    def loaded_px(self, cell: "CellSpec") -> int:
        """256 px for crops of 224."""
        return round(cell.batch.resolution_px * 8 / 7)

    def passes(self, cell: "CellSpec") -> tuple[Pass, ...]:
        """Large crops, then small ones."""
        assert isinstance(cell.model, ViTSpec)
        patches = cell.model.num_patches(cell.batch.resolution_px)
        first = (cell.num_tokens or 0) - patches
        small = first + cell.model.num_patches(self.small_px(cell))
        large = Pass(tokens=first + patches, views=self.large_views)
        return large, Pass(tokens=small, views=self.small_views)
