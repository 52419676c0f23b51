"""Real images without a download: scikit-learn's handwritten digits, as still images and as videos."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from annotated_types import Gt
from numpy.typing import NDArray

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches, Data

if TYPE_CHECKING:
    from torch import Tensor

    from vitsweep.data.batches import DeviceBatches
    from vitsweep.world import World

SIZES = 1198, 599
"""Training and held-out images: of every class, each third one is held out."""


@dataclass(frozen=True, kw_only=True)
class Digits(Data):
    """1,797 images of 8 x 8 px in 10 classes (E. Alpaydin, C. Kaynak, UCI 1998: "optical digits").

    Every third image, counted class by class, is held out, whatever the seed. Pixels are normalised
    by mean and standard deviation of the training images and resized bilinearly to
    `batch.resolution_px`.
    """

    fixed_sizes: ClassVar[tuple[int, int] | None] = SIZES
    larger: ClassVar[str] = "`data=synthetic`"
    num_channels: ClassVar[int] = 1  # grey
    num_classes: ClassVar[int] = 10  # the digits 0 to 9
    native_resolution_px: ClassVar[int] = 8  # side of an image in the file

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Read the file and put both parts on the device."""
        import torch

        from vitsweep.data.batches import DeviceBatches, Images, ReplicaSampler

        images, labels = read_digits()
        held_out = every_third_by_class(labels)
        images = (images - images[~held_out].mean()) / images[~held_out].std()
        train, test = (
            Images(
                torch.from_numpy(images[part]).to(world.device),
                torch.from_numpy(labels[part]).to(world.device),
                int(part.sum()),
            )
            for part in (~held_out, held_out)
        )
        resize = partial(resize_bilinear, side=cell.batch.resolution_px)
        return DeviceBatches(train, test, ReplicaSampler.of(cell, world), resize)


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
    fixed_sizes: ClassVar[tuple[int, int] | None] = SIZES
    larger: ClassVar[str] = "`data=synthetic_video`"
    num_channels: ClassVar[int] = 1  # grey
    native_resolution_px: ClassVar[int] = 16  # twice the side of a digit in the file

    @property
    def num_classes(self) -> int:
        """Ten digits in four directions."""
        return 10 * self.num_directions

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse too large a batch, and motion of less than a pixel per frame."""
        yield from super().conflicts(cell)
        if round(self.step_share * (cell.batch.resolution_px // 2)) < 1:
            yield (
                f"`data.step_share={self.step_share}` moves a digit by less than a pixel at "
                f"`batch.resolution_px={cell.batch.resolution_px}`: use a larger one of both."
            )

    def open(self, cell: CellSpec, world: "World") -> Batches:
        """Make the videos on this rank's device; the same on every rank."""
        return open_moving_digits(self, cell, world)


def read_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return images (1797, 1, 8, 8) with values 0 to 16 and labels (1797,).

    The file is read without importing scikit-learn, which takes longer (1.8 s) than measuring a
    small cell.
    """
    package: Any = find_spec("sklearn")  # a requirement of vitsweep
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    rows = _numbers(path)
    return rows[:, :-1].copy().reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)


@cache
def _numbers(path: Path) -> NDArray[np.float32]:
    """Return the numbers of the file, parsed once: it takes as long as a small cell is measured."""
    return np.loadtxt(path, delimiter=",", dtype=np.float32)


def every_third_by_class(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark every third image in the order of the classes, so that all lose the same share."""
    marked = np.zeros(len(labels), dtype=bool)
    marked[np.argsort(labels, kind="stable")[2::3]] = True
    return marked


def resize_bilinear(images: "Tensor", side: int) -> "Tensor":
    """Return (B, C, side, side); images of that size are returned as they are."""
    from torch.nn.functional import interpolate

    if images.shape[-1] == side:
        return images
    return interpolate(images, size=(side, side), mode="bilinear", antialias=True)


def open_moving_digits(data: "MovingDigits", cell: CellSpec, world: "World") -> "DeviceBatches":
    """Return batches of moving digits; directions and starts are those of the seed."""
    import torch
    from torch import Generator

    from vitsweep.data.batches import DeviceBatches, Images, ReplicaSampler

    images, digits = read_digits()
    side = cell.batch.resolution_px
    sprites = resize_bilinear(torch.from_numpy(images), side // 2)
    held_out = torch.from_numpy(every_third_by_class(digits))
    generator = Generator().manual_seed(cell.seed)
    directions = torch.randint(data.num_directions, (len(digits),), generator=generator)
    starts = torch.randint(side, (len(digits), 2), generator=generator)
    step = round(data.step_share * (side // 2))
    videos = moving(sprites, starts, directions, data.num_frames, side, step)
    videos = (videos - videos[~held_out].mean()) / videos[~held_out].std()
    labels = data.num_directions * torch.from_numpy(digits) + directions
    train, test = (
        Images(videos[part].to(world.device), labels[part].to(world.device), int(part.sum()))
        for part in (~held_out, held_out)
    )
    return DeviceBatches(train, test, ReplicaSampler.of(cell, world))


def moving(
    sprites: "Tensor", starts: "Tensor", directions: "Tensor", num_frames: int, side: int, step: int
) -> "Tensor":
    """Move sprites (N, 1, h, w) over a torus of `side` pixels -> (N, 1, F, side, side).

    Args:
        sprites: one per video.
        starts: (N, 2), row and column of the first frame.
        directions: (N,), 0 right, 1 left, 2 down, 3 up.
        num_frames: F.
        side: of a frame, in pixels.
        step: pixels from frame to frame.
    """
    import torch

    ways = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])[directions]
    frames = torch.arange(num_frames)
    corners = starts[:, None] + step * frames[:, None] * ways[:, None]  # (N, F, 2)
    rows = (corners[..., 0, None] + torch.arange(sprites.shape[-2])) % side
    columns = (corners[..., 1, None] + torch.arange(sprites.shape[-1])) % side
    canvas = sprites.new_zeros(len(sprites), num_frames, side, side)
    video = torch.arange(len(sprites))[:, None, None, None]
    canvas[video, frames[:, None, None], rows[..., None], columns[..., None, :]] = sprites
    return canvas.unsqueeze(1)
