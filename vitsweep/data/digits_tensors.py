"""Reading scikit-learn's digits, normalising and splitting them, and moving them over a torus."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.nn.functional import interpolate

from vitsweep.data.batches import DeviceBatches, Images, ReplicaSampler
from vitsweep.errors import VitsweepError
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

if TYPE_CHECKING:
    from vitsweep.data.digits import MovingDigits


def open_digits(cell: CellSpec, world: World) -> DeviceBatches:
    """Return batches of digits on this rank's device."""
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


def read_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return images (1797, 1, 8, 8) with values 0 to 16 and labels (1797,).

    The file is read without importing scikit-learn, which takes longer (1.8 s) than measuring a
    small cell.

    Raises:
        VitsweepError: scikit-learn is not installed, or keeps the file elsewhere.
    """
    package = find_spec("sklearn")
    roots = package.submodule_search_locations if package else None
    path = Path(roots[0] if roots else "", "datasets", "data", "digits.csv.gz")
    if not path.is_file():
        raise VitsweepError(
            f"`data=digits` reads scikit-learn's {path.name}, which is not there: "
            "`pip install scikit-learn`, or use `data=synthetic`."
        )
    rows = np.loadtxt(path, delimiter=",", dtype=np.float32)
    return rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].astype(np.int64)


def every_third_by_class(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark every third image in the order of the classes, so that all lose the same share."""
    marked = np.zeros(len(labels), dtype=bool)
    marked[np.argsort(labels, kind="stable")[2::3]] = True
    return marked


def resize_bilinear(images: Tensor, side: int) -> Tensor:
    """Return (B, C, side, side); images of that size are returned as they are."""
    if images.shape[-1] == side:
        return images
    return interpolate(images, size=(side, side), mode="bilinear", antialias=True)


def open_moving_digits(data: "MovingDigits", cell: CellSpec, world: World) -> DeviceBatches:
    """Return batches of moving digits; directions and starts are those of the seed."""
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
    sprites: Tensor, starts: Tensor, directions: Tensor, num_frames: int, side: int, step: int
) -> Tensor:
    """Move sprites (N, 1, h, w) over a torus of `side` pixels -> (N, 1, F, side, side).

    Args:
        sprites: one per video.
        starts: (N, 2), row and column of the first frame.
        directions: (N,), 0 right, 1 left, 2 down, 3 up.
        num_frames: F.
        side: of a frame, in pixels.
        step: pixels from frame to frame.
    """
    ways = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])[directions]
    frames = torch.arange(num_frames)
    corners = starts[:, None] + step * frames[:, None] * ways[:, None]  # (N, F, 2)
    rows = (corners[..., 0, None] + torch.arange(sprites.shape[-2])) % side
    columns = (corners[..., 1, None] + torch.arange(sprites.shape[-1])) % side
    canvas = sprites.new_zeros(len(sprites), num_frames, side, side)
    video = torch.arange(len(sprites))[:, None, None, None]
    canvas[video, frames[:, None, None], rows[..., None], columns[..., None, :]] = sprites
    return canvas.unsqueeze(1)
