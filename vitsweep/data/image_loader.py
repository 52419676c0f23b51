"""Batches of an image folder that processes or threads read while the model trains."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitsweep.data.batches import ReplicaSampler
from vitsweep.data.decoded_cache import DecodedImages, decoded_images
from vitsweep.data.folder_scan import Files, files
from vitsweep.data.image_reader import ImageReader, Read
from vitsweep.data.image_threads import ThreadedReads
from vitsweep.data.loader_batches import LoaderBatches, Pair, Request
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
    """Return batches of a folder on this rank's device; reading starts with `train` or `test`.

    Raises:
        BadValueError: the loader keeps decoded pixels of other images.
    """
    assert data.folder is not None, "refused when the cell was made"
    splits = {split: files(data.folder, split) for split in ("train", "val")}
    cache = cell.loader.pixel_cache
    read = ["train", "val"] if cell.task.epochs else ["train"]
    decoded = {split: decoded_images(splits[split], cache) for split in read} if cache else {}
    return ImageFolderBatches(
        data,
        ReplicaSampler.of(cell, world),
        cell.batch.resolution_px,
        world.device,
        splits,
        decoded,
        in_threads=cell.loader.reads_in == "threads" and data.num_workers > 0,
    )


class ImageFolderBatches(LoaderBatches[Read]):
    """Batches of a folder, decoded and cut by workers or threads.

    Args:
        data: settings of the data.
        sampler: of this replica.
        side: of a cut, in pixels.
        device: where batches are delivered.
        splits: `train` and `val`.
        decoded: by split, where its pixels are kept; files are decoded elsewhere.
        in_threads: read in threads, not in processes.

    Attributes:
        damage: what could not be read so far, by split.
    """

    def __init__(
        self,
        data: "ImageFolder",
        sampler: ReplicaSampler,
        side: int,
        device: torch.device,
        splits: Mapping[str, Files],
        decoded: Mapping[str, DecodedImages],
        *,
        in_threads: bool,
    ) -> None:
        self._splits, self._decoded, self._in_threads = splits, decoded, in_threads
        self.num_train, self.num_test = len(splits["train"]), len(splits["val"])
        self.damage = {
            split: DamagedImages(len(found), data.max_damaged_share)
            for split, found in splits.items()
        }
        self._data, self._side = data, side
        self._mean = 255 * torch.tensor(MEAN, device=device).view(3, 1, 1)
        self._deviation = 255 * torch.tensor(DEVIATION, device=device).view(3, 1, 1)
        super().__init__(sampler, device, data.num_workers, data.prefetch_batches)
        if in_threads:
            self.prefetched = data.prefetch_batches

    def prepare(self) -> None:
        """Threads need no preparation."""
        if not self._in_threads:
            super().prepare()

    def start_reading(self, reader: Any, requests: Iterable[Request]) -> Iterator[Read]:
        """Start threads or processes."""
        if not self._in_threads:
            return super().start_reading(reader, requests)
        pinned = self._device.type == "cuda"
        return ThreadedReads(
            reader, requests, self._num_workers, self._prefetch_batches, pinned=pinned
        )

    def reader(self, *, training: bool) -> ImageReader:
        """Return what decodes images of one split."""
        split = "train" if training else "val"
        return ImageReader(
            self._splits[split],
            side=self._side,
            crop_share=self._data.smallest_crop_share if training else self._data.test_crop_share,
            training=training,
            seed=self._sampler.seed,
            max_damaged=self.damage[split].most,
            decoded=self._decoded.get(split),
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
