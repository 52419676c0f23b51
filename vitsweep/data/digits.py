"""Real images without a download: the handwritten digits that come with scikit-learn."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitsweep.data.sufficiency import count_reasons, head_reasons
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Batches, Data

if TYPE_CHECKING:
    from vitsweep.world import World


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
        """1,198 images bound the batch, and a digit has a label, no field."""
        yield from head_reasons(cell, "classify")
        yield from count_reasons(cell, 1198, 599, "`data=synthetic`")

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Read the file and put both parts on the device."""
        from vitsweep.data.digits_file import open_digits

        return open_digits(cell, world)
