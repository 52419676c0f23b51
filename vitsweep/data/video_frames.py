"""Making videos (N, C, F, H, W) on the device."""

import torch
from torch import Generator, Tensor

from vitsweep.data.digits_file import every_third_by_class, read_digits, resize_bilinear
from vitsweep.data.moving_digits import NUM_DIRECTIONS, MovingDigits
from vitsweep.data.random_images import noise
from vitsweep.data.resident import Images, ResidentBatches
from vitsweep.data.share import Share
from vitsweep.data.synthetic_video import SyntheticVideo
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World


def open_moving_digits(data: MovingDigits, cell: CellSpec, world: World) -> ResidentBatches:
    """Return batches of moving digits; directions and starts are those of the seed."""
    images, digits = read_digits()
    side = cell.batch.resolution_px
    sprites = resize_bilinear(torch.from_numpy(images), side // 2)
    held_out = torch.from_numpy(every_third_by_class(digits))
    generator = Generator().manual_seed(cell.seed)
    directions = torch.randint(NUM_DIRECTIONS, (len(digits),), generator=generator)
    starts = torch.randint(side, (len(digits), 2), generator=generator)
    step = round(data.step_share * (side // 2))
    videos = moving(sprites, starts, directions, data.num_frames, side, step)
    videos = (videos - videos[~held_out].mean()) / videos[~held_out].std()
    labels = NUM_DIRECTIONS * torch.from_numpy(digits) + directions
    train, test = (
        Images(videos[part].to(world.device), labels[part].to(world.device), int(part.sum()))
        for part in (~held_out, held_out)
    )
    return ResidentBatches(train, test, Share.of(cell, world))


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


def open_synthetic_video(data: SyntheticVideo, cell: CellSpec, world: World) -> ResidentBatches:
    """Return batches of noise; the videos are those of the seed on every rank."""
    generator = Generator(world.device).manual_seed(cell.seed)
    side = cell.batch.resolution_px

    def part(num_videos: int) -> Images:
        count = min(num_videos, data.num_distinct)
        videos = noise((count, data.num_channels, data.num_frames, side, side), generator)
        labels = torch.randint(
            data.num_classes, (count,), generator=generator, device=generator.device
        )
        return Images(videos, labels, num_videos)

    return ResidentBatches(part(data.num_train), part(data.num_test), Share.of(cell, world))
