"""Real digits on the move: videos whose label needs both space and time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from vitsweep.data.sufficiency import count_reasons, head_reasons
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Batches, Data

if TYPE_CHECKING:
    from vitsweep.world import World

NUM_DIRECTIONS = 4
"""Right, left, down, up."""


@dataclass(frozen=True, kw_only=True)
class MovingDigits(Data):
    """scikit-learn's handwritten digits, each moving over a torus; after Moving MNIST (1502.04681).

    One digit, half as wide as the frame, starts anywhere and moves `step_share` of its width per
    frame in one of four directions. Label = 4 x digit + direction: no single frame shows the
    direction, and no single place shows the digit. As many videos as `data=digits` has images.

    Attributes:
        num_frames: of a video.
        step_share: way of a digit from frame to frame, in its own widths.
    """

    num_frames: Annotated[int, Gt(1)]
    step_share: Annotated[float, Gt(0)]

    @property
    def num_channels(self) -> int:
        """Grey."""
        return 1

    @property
    def num_classes(self) -> int:
        """Ten digits in four directions."""
        return 10 * NUM_DIRECTIONS

    @property
    def native_resolution_px(self) -> int:
        """Twice the side of a digit in the file."""
        return 16

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """1,198 videos bound the batch, and a step has to be seen."""
        yield from head_reasons(cell, "classify")
        yield from count_reasons(cell, 1198, 599, "`data=synthetic_video`")
        if round(self.step_share * (cell.batch.resolution_px // 2)) < 1:
            yield (
                f"`data.step_share={self.step_share}` moves a digit by less than a pixel at "
                f"`batch.resolution_px={cell.batch.resolution_px}`: use a larger one of both."
            )

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Read the digits and set them moving, on the device; the same on every rank."""
        from vitsweep.data.video_frames import open_moving_digits

        return open_moving_digits(self, cell, world)
