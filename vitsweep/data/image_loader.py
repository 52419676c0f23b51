"""Batches of an image folder that worker processes read while the model trains."""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitsweep.data.folder_scan import files
from vitsweep.data.image_reader import ImageReader, Read
from vitsweep.data.loader_batches import LoaderBatches, Pair
from vitsweep.data.replica_sampler import ReplicaSampler
from vitsweep.errors import VitsweepError
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

if TYPE_CHECKING:
    from vitsweep.data.image_folder import ImageFolder

LOG = logging.getLogger(__name__)


@dataclass
class DamagedImages:
    """Damaged images of one split that this rank has met.

    Attributes:
        num_images: of the split.
        max_share: of them that may be damaged.
        found: path -> reason.
    """

    num_images: int
    max_share: float
    found: dict[str, str] = field(default_factory=dict)

    @property
    def most(self) -> int:
        """Number of damaged images that are allowed."""
        return int(self.max_share * self.num_images)

    def add(self, damaged: list[tuple[str, str]]) -> None:
        """Record damaged images and log those not seen before.

        Raises:
            VitsweepError: there are more than `max_share` of the split.
        """
        for path, reason in damaged:
            if path not in self.found:
                self.found[path] = reason
                LOG.warning("%s cannot be read (%s): skipped.", path, reason)
        if len(self.found) > self.most:
            names = ", ".join(list(self.found)[:3])
            raise VitsweepError(
                f"{len(self.found)} of {self.num_images} images cannot be read, more than "
                f"`data.max_damaged_share={self.max_share}` allows: {names}"
                f"{', ...' if len(self.found) > 3 else ''}. Mend or remove them, or raise the share."
            )


MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's training images per channel, on a scale from 0 to 1 (torchvision's constants)."""


def open_image_folder(data: "ImageFolder", cell: CellSpec, world: World) -> "ImageFolderBatches":
    """Return batches of a folder on this rank's device; reading starts with `train` or `test`."""
    return ImageFolderBatches(
        data, ReplicaSampler.of(cell, world), cell.batch.resolution_px, world.device
    )


class ImageFolderBatches(LoaderBatches[Read]):
    """Batches of a folder, decoded and cut by workers.

    Attributes:
        damage: what could not be read so far, by split.
    """

    def __init__(
        self, data: "ImageFolder", sampler: ReplicaSampler, side: int, device: torch.device
    ) -> None:
        assert data.folder is not None, "refused when the cell was made"
        self._train_files, self._test_files = (files(data.folder, s) for s in ("train", "val"))
        self.num_train, self.num_test = len(self._train_files), len(self._test_files)
        self.damage = {
            split: DamagedImages(num_images, data.max_damaged_share)
            for split, num_images in (("train", self.num_train), ("val", self.num_test))
        }
        self._data, self._side = data, side
        self._mean = 255 * torch.tensor(MEAN, device=device).view(3, 1, 1)
        self._deviation = 255 * torch.tensor(DEVIATION, device=device).view(3, 1, 1)
        super().__init__(sampler, device, data.num_workers, data.prefetch_batches)

    def reader(self, *, training: bool) -> ImageReader:
        """Return what decodes images of one split."""
        return ImageReader(
            self._train_files if training else self._test_files,
            side=self._side,
            crop_share=self._data.smallest_crop_share if training else self._data.test_crop_share,
            training=training,
            seed=self._sampler.seed,
            max_damaged=self.damage["train" if training else "val"].most,
        )

    def deliver(self, read: Read, *, training: bool) -> Pair:
        """Note what was damaged, and normalise the rest on the device."""
        self.damage["train" if training else "val"].add(read.damaged)
        return self._normalised(read.images), self._there(read.labels)

    def _normalised(self, images: Tensor) -> Tensor:
        """(B, H, W, 3) uint8 here -> (B, 3, H, W) float32 on the device."""
        pixels = self._there(images).permute(0, 3, 1, 2)
        pixels = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return pixels.sub_(self._mean).div_(self._deviation)
