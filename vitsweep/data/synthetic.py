"""Images, fields and videos that cost nothing to get: made on the device from the seed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches, Data, head_conflicts, image_count_conflicts

if TYPE_CHECKING:
    from torch import Generator, Tensor

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
        """Make the images on this rank's device; those of the seed, the same on every rank."""
        from torch import Generator

        from vitsweep.data.batches import DeviceBatches, Images, ReplicaSampler

        generator = Generator(world.device).manual_seed(cell.seed)

        def part(num_images: int) -> Images:
            count = min(num_images, self.num_distinct)
            return Images(*self.drawn(count, cell.batch.resolution_px, generator), num_images)

        sampler = ReplicaSampler.of(cell, world)
        return DeviceBatches(part(self.num_train), part(self.num_test), sampler)

    def drawn(self, count: int, side_px: int, generator: "Generator") -> "tuple[Tensor, Tensor]":
        """Return images (count, C, side_px, side_px) and labels (count,), on the generator's device."""
        return self._labelled((count, self.num_channels, side_px, side_px), generator)

    def _labelled(self, shape: tuple[int, ...], generator: "Generator") -> "tuple[Tensor, Tensor]":
        import torch

        images, device = noise(shape, generator), generator.device
        labels = torch.randint(self.num_classes, shape[:1], generator=generator, device=device)
        return images, labels


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

    def drawn(self, count: int, side_px: int, generator: "Generator") -> "tuple[Tensor, Tensor]":
        """Return fields (count, C, side_px, side_px) and their targets."""
        white = noise((count, self.num_channels, side_px, side_px), generator)
        fields = smooth(white, self.smoothness)
        return fields, fields[:, : self.num_classes].roll(self.wind_px, dims=-1)


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

    def drawn(self, count: int, side_px: int, generator: "Generator") -> "tuple[Tensor, Tensor]":
        """Return videos (count, C, T, side_px, side_px) and labels (count,)."""
        shape = (count, self.num_channels, self.num_frames, side_px, side_px)
        return self._labelled(shape, generator)


def noise(shape: tuple[int, ...], generator: "Generator") -> "Tensor":
    """Return independent normal numbers on the generator's device."""
    import torch

    return torch.randn(shape, generator=generator, device=generator.device)


def smooth(white: "Tensor", smoothness: float) -> "Tensor":
    """Return periodic fields (..., H, W) whose power falls as wave number ** -smoothness.

    Each field has mean 0 and standard deviation 1.
    """
    import torch

    height, width = white.shape[-2:]
    waves_y = torch.fft.fftfreq(height, 1 / height, device=white.device)
    waves_x = torch.fft.rfftfreq(width, 1 / width, device=white.device)
    power = waves_y[:, None] ** 2 + waves_x[None, :] ** 2
    power[0, 0] = 1
    amplitude = power ** (-smoothness / 4)
    amplitude[0, 0] = 0
    fields = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(height, width))
    return fields / fields.std(dim=(-2, -1), keepdim=True)
