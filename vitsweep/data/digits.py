"""Real images without a download: scikit-learn's handwritten digits, as still images and as videos."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches, Data, head_conflicts, image_count_conflicts

if TYPE_CHECKING:
    from vitsweep.world import World

NUM_TRAIN, NUM_TEST = 1198, 599


@dataclass(frozen=True, kw_only=True)
class Digits(Data):
    """1,797 images of 8 x 8 px in 10 classes (E. Alpaydin, C. Kaynak, UCI 1998: "optical digits").

    Every third image, counted class by class, is held out, whatever the seed. Pixels are normalised
    by mean and standard deviation of the training images and resized bilinearly to
    `batch.resolution_px`.
    """

    @property
    def num_channels(self) -> int:
        """Grey."""
        return 1

    @property
    def num_classes(self) -> int:
        """The digits 0 to 9."""
        return 10

    @property
    def native_resolution_px(self) -> int:
        """Side of an image in the file."""
        return 8

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse a dense head, and more images per step than the 1,198 of an epoch."""
        yield from head_conflicts(cell, "classify")
        yield from image_count_conflicts(cell, NUM_TRAIN, NUM_TEST, "`data=synthetic`")

    def split_sizes(self) -> tuple[int, int]:
        """Two thirds to train on, one third held out."""
        return NUM_TRAIN, NUM_TEST

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Read the file and put both parts on the device."""
        from vitsweep.data.digits_tensors import open_digits

        return open_digits(cell, world)


@dataclass(frozen=True, kw_only=True)
class MovingDigits(Data):
    """scikit-learn's handwritten digits, each moving over a torus; after Moving MNIST (1502.04681).

    One digit, half as wide as the frame, starts anywhere and moves `step_share` of its width per
    frame in one of four directions. Label = 4 x digit + direction: no single frame shows the
    direction, and no single place shows the digit. As many videos as `data=digits` has images.

    Attributes:
        num_frames: of a video.
        step_share: distance that a digit moves per frame, in its own widths.
    """

    num_frames: Annotated[int, Gt(1)]
    step_share: Annotated[float, Gt(0)]

    num_directions: ClassVar[int] = 4
    """Right, left, down, up."""

    @property
    def num_channels(self) -> int:
        """Grey."""
        return 1

    @property
    def num_classes(self) -> int:
        """Ten digits in four directions."""
        return 10 * self.num_directions

    @property
    def native_resolution_px(self) -> int:
        """Twice the side of a digit in the file."""
        return 16

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse a dense head, too large a batch, and motion of less than a pixel per frame."""
        yield from head_conflicts(cell, "classify")
        yield from image_count_conflicts(cell, NUM_TRAIN, NUM_TEST, "`data=synthetic_video`")
        if round(self.step_share * (cell.batch.resolution_px // 2)) < 1:
            yield (
                f"`data.step_share={self.step_share}` moves a digit by less than a pixel at "
                f"`batch.resolution_px={cell.batch.resolution_px}`: use a larger one of both."
            )

    def split_sizes(self) -> tuple[int, int]:
        """As many videos as there are digits."""
        return NUM_TRAIN, NUM_TEST

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Make the videos on this rank's device; the same on every rank."""
        from vitsweep.data.digits_tensors import open_moving_digits

        return open_moving_digits(self, cell, world)
