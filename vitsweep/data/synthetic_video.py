"""Videos that cost nothing to get: made on the device from the seed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from vitsweep.data.synthetic import Synthetic
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Batches

if TYPE_CHECKING:
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class SyntheticVideo(Synthetic):
    """Normally distributed pixels with random labels, in frames: for speed, not for accuracy.

    Attributes:
        num_frames: of a video.
    """

    num_frames: Annotated[int, Gt(0)]

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Make the videos on this rank's device; the same on every rank."""
        from vitsweep.data.video_frames import open_synthetic_video

        return open_synthetic_video(self, cell, world)
