"""Images and videos that cost nothing to get: made on the device from the seed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Gt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches, Data, image_count_conflicts

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
        """Refuse too few images for a step or a test."""
        more = "a larger `data.num_train` and `data.num_test`"
        return image_count_conflicts(cell, self.num_train, self.num_test, more)

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

        parts = part(self.num_train), part(self.num_test)
        sampler = ReplicaSampler.of(cell, world)
        return DeviceBatches(*parts, sampler, texts=self.texts(generator))

    def texts(self, generator: "Generator") -> "tuple[Tensor, Tensor] | None":
        """Return what labels are numbers of, where they are: texts, and how long they are."""
        return None

    def drawn(self, count: int, side_px: int, generator: "Generator") -> "tuple[Tensor, Tensor]":
        """Return images (count, C, side_px, side_px) and labels (count,), on the generator's device."""
        import torch

        device, shape = generator.device, (count, *self._frames(), side_px, side_px)
        images = torch.randn(shape, generator=generator, device=device)
        labels = torch.randint(self.num_classes, (count,), generator=generator, device=device)
        return images, labels

    def _frames(self) -> tuple[int, ...]:
        return (self.num_channels,)


@dataclass(frozen=True, kw_only=True)
class SyntheticVideo(Synthetic):
    """Normally distributed pixels with random labels, in frames: for speed, not for accuracy.

    Attributes:
        num_frames: of a video.
    """

    num_frames: Annotated[int, Gt(0)]

    def _frames(self) -> tuple[int, ...]:
        return self.num_channels, self.num_frames


@dataclass(frozen=True, kw_only=True)
class SyntheticLatents(SyntheticVideo):
    """Normally distributed latents of videos with texts: what a diffusion transformer of videos reads.

    A label is the number of one of `num_classes` texts, whose lengths are drawn once.

    Attributes:
        text_vectors: of the longest text; others have 1 to as many.
        text_width: size of a vector.
    """

    text_vectors: Annotated[int, Gt(0)]
    text_width: Annotated[int, Gt(0)]

    def texts(self, generator: "Generator") -> "tuple[Tensor, Tensor]":
        """Return texts (N, L, width) and their lengths (N,)."""
        import torch

        size, device = (self.num_classes, self.text_vectors, self.text_width), generator.device
        vectors = torch.randn(size, generator=generator, device=device)
        lengths = torch.randint(size[1], size[:1], generator=generator, device=device) + 1
        return vectors, lengths
