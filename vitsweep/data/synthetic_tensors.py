"""Making random images, fields, videos and their labels on the device."""

from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from vitsweep.data.batches import DeviceBatches, Images, ReplicaSampler
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

if TYPE_CHECKING:
    from vitsweep.data.synthetic import Synthetic, SyntheticField, SyntheticVideo


def open_synthetic(data: "Synthetic", cell: CellSpec, world: World) -> DeviceBatches:
    """Return batches of noise; the images are those of the seed on every rank."""
    generator = Generator(world.device).manual_seed(cell.seed)

    def part(num_images: int) -> Images:
        count = min(num_images, data.num_distinct)
        side = cell.batch.resolution_px
        images = noise((count, data.num_channels, side, side), generator)
        labels = torch.randint(
            data.num_classes, (count,), generator=generator, device=generator.device
        )
        return Images(images, labels, num_images)

    return DeviceBatches(part(data.num_train), part(data.num_test), ReplicaSampler.of(cell, world))


def open_synthetic_field(data: "SyntheticField", cell: CellSpec, world: World) -> DeviceBatches:
    """Return batches of fields and their targets; those of the seed on every rank."""
    generator = Generator(world.device).manual_seed(cell.seed)

    def part(num_images: int) -> Images:
        count = min(num_images, data.num_distinct)
        side = cell.batch.resolution_px
        fields = smooth(noise((count, data.num_channels, side, side), generator), data.smoothness)
        targets = fields[:, : data.num_classes].roll(data.wind_px, dims=-1)
        return Images(fields, targets, num_images)

    return DeviceBatches(part(data.num_train), part(data.num_test), ReplicaSampler.of(cell, world))


def open_synthetic_video(data: "SyntheticVideo", cell: CellSpec, world: World) -> DeviceBatches:
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

    return DeviceBatches(part(data.num_train), part(data.num_test), ReplicaSampler.of(cell, world))


def noise(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Return independent normal numbers on the generator's device."""
    return torch.randn(shape, generator=generator, device=generator.device)


def smooth(white: Tensor, smoothness: float) -> Tensor:
    """Return periodic fields (..., H, W) whose power falls as wave number ** -smoothness.

    Each field has mean 0 and standard deviation 1.
    """
    height, width = white.shape[-2:]
    waves_y = torch.fft.fftfreq(height, 1 / height, device=white.device)
    waves_x = torch.fft.rfftfreq(width, 1 / width, device=white.device)
    power = waves_y[:, None] ** 2 + waves_x[None, :] ** 2
    power[0, 0] = 1
    amplitude = power ** (-smoothness / 4)
    amplitude[0, 0] = 0
    fields = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(height, width))
    return fields / fields.std(dim=(-2, -1), keepdim=True)
