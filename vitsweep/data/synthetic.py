"""Images, fields and videos that cost nothing to get: made on the device from the seed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches, Data, head_conflicts, image_count_conflicts

if TYPE_CHECKING:
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Synthetic(Data):
    """Normally distributed pixels with random labels: for speed, not for accuracy.

    Labels say nothing about images, so that accuracy on held-out images stays at chance.

    Attributes:
        num_channels: channels of an image.
        num_classes: labels.
        native_resolution_px: side of an image where `batch.resolution_px=auto`.
        num_train: images of an epoch.
        num_test: held-out images.
        num_distinct: images really made of each part; they come round again.
    """

    num_channels: Annotated[int, Gt(0)]
    num_classes: Annotated[int, Gt(0)]
    native_resolution_px: Annotated[int, Gt(0)]
    num_train: Annotated[int, Gt(0)]
    num_test: Annotated[int, Ge(0)]
    num_distinct: Annotated[int, Gt(0)]

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse a dense head, and too few images."""
        yield from head_conflicts(cell, "classify")
        yield from enough_images(self, cell)

    def split_sizes(self) -> tuple[int, int]:
        """As configured."""
        return self.num_train, self.num_test

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Make the images on this rank's device; the same on every rank."""
        from vitsweep.data.synthetic_tensors import open_synthetic

        return open_synthetic(self, cell, world)


@dataclass(frozen=True, kw_only=True)
class SyntheticField(Synthetic):
    """Smooth random fields on a torus and, as targets, the same fields shifted by a constant wind.

    They stand for scientific fields (weather: many channels, a dense regression): the first
    `num_classes` channels are to be predicted one step ahead.

    Attributes:
        smoothness: power spectrum falls as wave number ** -smoothness; 0 is white noise.
        wind_px: pixels by which a step moves the fields along the last axis.
    """

    smoothness: Annotated[float, Ge(0)]
    wind_px: int

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse a head for labels, and more target channels than input channels."""
        yield from head_conflicts(cell, "dense")
        yield from enough_images(self, cell)
        if self.num_classes > self.num_channels:
            yield (
                f"`data.num_classes={self.num_classes}` channels cannot be predicted from "
                f"`data.num_channels={self.num_channels}`: targets are the inputs one step ahead."
            )

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Make the fields on this rank's device; the same on every rank."""
        from vitsweep.data.synthetic_tensors import open_synthetic_field

        return open_synthetic_field(self, cell, world)


def enough_images(data: Synthetic, cell: CellSpec) -> Iterator[str]:
    """Yield reasons why there are too few images for a step or a test."""
    more = "a larger `data.num_train` and `data.num_test`"
    return image_count_conflicts(cell, data.num_train, data.num_test, more)


@dataclass(frozen=True, kw_only=True)
class SyntheticVideo(Synthetic):
    """Normally distributed pixels with random labels, in frames: for speed, not for accuracy.

    Attributes:
        num_frames: of a video.
    """

    num_frames: Annotated[int, Gt(0)]

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Make the videos on this rank's device; the same on every rank."""
        from vitsweep.data.synthetic_tensors import open_synthetic_video

        return open_synthetic_video(self, cell, world)
