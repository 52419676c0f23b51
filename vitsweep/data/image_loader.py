"""Batches of an image folder that processes read while the model trains."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitsweep.data.batches import LoaderBatches, Pair, Request
from vitsweep.data.decoded_cache import (
    DecodedImages,
    centre_box,
    cut,
    decode,
    decoded_images,
    random_box,
)
from vitsweep.data.folder_files import Files
from vitsweep.errors import VitsweepError
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World


class Read(NamedTuple):
    """A batch that was read.

    Attributes:
        images: (B, H, W, 3) uint8: a quarter of the bytes that would travel as float32.
        labels: (B,) int64.
        damaged: path and reason of every image that could not be read.
    """

    images: Tensor
    labels: Tensor
    damaged: list[tuple[str, str]]


class ImageReader(Dataset[Read]):
    """Reads requests, for training (random cuts) or for a test (centre cuts).

    A damaged image is replaced by the next readable one when training. In a test it is left out
    instead: no other image may count twice.

    Args:
        files: of one split.
        side: of a cut, in pixels.
        crop_share: smallest share of the area when training, share of the shorter side in a test.
        training: cut and mirror at random, unless `centred`.
        seed: decides the cuts, together with epoch and row.
        max_damaged: a request that meets more damaged images is given up: the run will fail.
        centred: keep all of the shorter side, about the centre: an objective cuts on the device.
        decoded: the pixels of the split, where they are kept; None decodes the files.
    """

    def __init__(
        self,
        files: Files,
        *,
        side: int,
        crop_share: float,
        training: bool,
        seed: int,
        max_damaged: int,
        centred: bool = False,
        decoded: DecodedImages | None = None,
    ) -> None:
        self.files, self.side, self.crop_share = files, side, crop_share
        self.centred = centred
        self.training, self.seed, self.max_damaged = training, seed, max_damaged
        self.decoded = decoded

    def __getitem__(self, request: Request) -> Read:
        """Read one batch; it is shorter than asked where damaged images were left out."""
        images = torch.empty((len(request.rows), self.side, self.side, 3), dtype=torch.uint8)
        pixels, labels = images.numpy(), list[int]()
        damaged: dict[str, str] = {}
        for row in request.rows.tolist():
            count = len(self.files) if self.training else 1
            for found in ((row + step) % len(self.files) for step in range(count)):
                if len(damaged) > self.max_damaged:
                    break
                path, cached = self.files.path(found), self.decoded
                image = cached.image(found) if cached else decode(path)
                if not isinstance(image, str):  # it can be read
                    share = 1.0 if self.centred else self.crop_share
                    box, is_mirrored = centre_box(*image.size, share), False
                    if self.training and not self.centred:
                        random = np.random.default_rng((self.seed, request.epoch, found))
                        box = random_box(*image.size, self.crop_share, random)
                        is_mirrored = bool(random.random() < 0.5)
                    pixels[len(labels)] = cut(image, box, self.side, mirrored=is_mirrored)
                    labels.append(int(self.files.labels[found]))
                    break
                damaged[path] = image
        read = torch.tensor(labels, dtype=torch.int64)
        return Read(images[: len(labels)], read, list(damaged.items()))


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
        """Record damaged images (path and reason of each) and log those not seen before.

        Raises:
            VitsweepError: there are more than `max_share` of the split.
        """
        for path, reason in damaged:
            if path not in self.found:
                self.found[path] = reason
                LOG.warning("%s cannot be read (%s): skipped.", path, reason)
        if len(self.found) > self.most:
            raise VitsweepError(
                f"At least {len(self.found)} of {self.num_images} images cannot be read, more than "
                f"`data.max_damaged_share={self.max_share}` allows: {', '.join(sorted(self.found)[:3])}. "
                "`damaged_images.jsonl` in the sweep's folder names those that were met. Mend or remove "
                "them, or raise the share."
            )


MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's training images per channel, on a scale from 0 to 1 (torchvision's constants)."""


class ImageFolderBatches(LoaderBatches[Read]):
    """Batches of a folder on a rank's device, decoded and cut by workers.

    Args:
        cell: what is trained.
        world: this rank.
        splits: `train` and `val`.
        decoded: names of the splits whose pixels `loader` may keep decoded.
        crop_shares: by split, see `ImageReader`.
        max_damaged_share: of a split.
        num_workers: processes that read.
        prefetch_batches: micro-batches that each worker prepares ahead.

    Attributes:
        damage: what could not be read so far, by split.

    Raises:
        BadValueError: the loader keeps decoded pixels of other images.
    """

    def __init__(
        self,
        cell: CellSpec,
        world: World,
        splits: Mapping[str, Files],
        *,
        decoded: Iterable[str],
        crop_shares: Mapping[str, float],
        max_damaged_share: float,
        num_workers: int,
        prefetch_batches: int,
    ) -> None:
        cache = cell.loader.pixel_cache
        self._decoded = {split: decoded_images(splits[split], cache) for split in decoded if cache}
        self._splits, self._crop_shares = splits, crop_shares
        self._own_px = cell.objective.loaded_px(cell)
        self._side = self._own_px or cell.batch.resolution_px
        self.num_train, self.num_test = len(splits["train"]), len(splits["val"])
        self.damage = {
            split: DamagedImages(len(found), max_damaged_share) for split, found in splits.items()
        }
        self._mean = 255 * torch.tensor(MEAN, device=world.device).view(3, 1, 1)
        self._deviation = 255 * torch.tensor(DEVIATION, device=world.device).view(3, 1, 1)
        super().__init__(cell, world, num_workers, prefetch_batches)

    def reader(self, *, training: bool) -> ImageReader:
        """Return what decodes images of one split."""
        split = "train" if training else "val"
        return ImageReader(
            self._splits[split],
            side=self._side,
            crop_share=self._crop_shares[split],
            training=training,
            seed=self._sampler.seed,
            max_damaged=self.damage[split].most,
            centred=self._own_px is not None,
            decoded=self._decoded.get(split),
        )

    @property
    def damaged(self) -> dict[str, str]:
        """What could not be read so far, of both splits."""
        return {path: why for split in self.damage.values() for path, why in split.found.items()}

    def deliver(self, read: Read, *, training: bool) -> Pair:
        """Note what was damaged, and normalise the rest on the device."""
        damage = self.damage["train" if training else "val"]
        if read.damaged:
            damage.add(read.damaged)
        pixels = self._there(read.images).permute(0, 3, 1, 2)  # uint8, whose channels were last
        pixels = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return pixels.sub_(self._mean).div_(self._deviation), self._there(read.labels)
