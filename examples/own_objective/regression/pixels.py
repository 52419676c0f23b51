"""Per-pixel regression: an objective of one's own, with what it adds to the network and its reference."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt
from torch import Tensor, nn
from torch.nn import functional as F

from vitsweep.objectives.base import Batch, OpenObjective, Step, Sum
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.objective import Objective


@dataclass(frozen=True, kw_only=True)
class Pixels(Objective):
    """Mean square error of a small image."""

    scores: ClassVar[Mapping[str, Literal["higher", "lower"]]] = {"held_out_loss": "lower"}

    side_px: Annotated[int, Gt(0)]

    def open(self, cell: CellSpec) -> OpenObjective:
        """Return what computes it."""
        return OpenPixels(cell, self.side_px)


class OpenPixels(OpenObjective):
    """The small image is the mean over tiles of the image."""

    def __init__(self, cell: CellSpec, side_px: int) -> None:
        super().__init__(cell)
        self.side_px = side_px

    def network(self, model: nn.Module) -> nn.Module:
        """Let the head return C x side x side numbers in place of logits."""
        head: Any = model.head
        pixels = self.cell.model.in_channels * self.side_px**2
        model.head = nn.Linear(head.in_features, pixels, device=head.weight.device)
        return model

    def prepare(self, batch: Batch, step: Step) -> Batch:
        """Return the images and the small images (B, C x side x side)."""
        small = F.adaptive_avg_pool2d(batch["image"].double(), self.side_px)  # sums of either order
        return {"image": batch["image"], "target": small.flatten(1)}

    def loss(self, outputs: Tensor, batch: Batch, step: Step) -> Tensor:
        """Return the mean over images and pixels."""
        return F.mse_loss(outputs, batch["target"].to(outputs.dtype))

    def score(self, outputs: Tensor, batch: Batch, step: Step) -> Mapping[str, Sum]:
        """Return the sum over images of their mean square errors."""
        errors = (outputs - batch["target"]).square().mean(dim=1)
        return {"held_out_loss": Sum(errors.sum(), len(errors))}

    def reference(self) -> OpenObjective:
        """Return the same with loops."""
        return PlainPixels(self.cell, self.side_px)


class PlainPixels(OpenPixels):
    """Tiles one by one."""

    def prepare(self, batch: Batch, step: Step) -> Batch:
        """Cut the images into tiles."""
        images = batch["image"].double()
        tile = images.shape[-1] // self.side_px
        rows = [strip.split(tile, dim=3) for strip in images.split(tile, dim=2)]
        means = [part.mean(dim=(2, 3)) for strip in rows for part in strip]
        small = images.new_empty(len(images), means[0].shape[1], len(means))
        for place, mean in enumerate(means):
            small[..., place] = mean
        return {"image": batch["image"], "target": small.flatten(1)}

    def loss(self, outputs: Tensor, batch: Batch, step: Step) -> Tensor:
        """Return the mean of squares."""
        apart = outputs - batch["target"].to(outputs.dtype)
        return (apart * apart).sum() / apart.numel()
