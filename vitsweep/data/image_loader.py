"""Batches of an image folder that worker processes read while the model trains."""

import logging
import weakref
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitsweep.data.folder_scan import files
from vitsweep.data.image_reader import ImageReader, Read, Request
from vitsweep.data.loader_workers import START_METHOD, as_read, begin_worker, start_fork_server
from vitsweep.data.replica_sampler import ReplicaSampler
from vitsweep.errors import VitsweepError
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches
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

Pair = tuple[Tensor, Tensor]


def open_image_folder(data: "ImageFolder", cell: CellSpec, world: World) -> "ImageFolderBatches":
    """Return batches of a folder on this rank's device; reading starts with `train` or `test`."""
    return ImageFolderBatches(
        data, ReplicaSampler.of(cell, world), cell.batch.resolution_px, world.device
    )


class ImageFolderBatches(Batches):
    """Batches that a DataLoader's workers read.

    `next()` returns at once if a batch is ready and waits for the workers otherwise: its time is
    how late the data are, plus the launch of transfer and normalisation. Workers read across the
    border of epochs; where epochs do not follow one another, or one is left half way, they start
    anew.

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
        self._data, self._sampler, self._side, self._device = data, sampler, side, device
        self.prefetched = data.num_workers * data.prefetch_batches
        self._mean = 255 * torch.tensor(MEAN, device=device).view(3, 1, 1)
        self._deviation = 255 * torch.tensor(DEVIATION, device=device).view(3, 1, 1)
        self._reads: Iterator[Read] = iter(())
        self._next_epoch: int | None = None  # whose first batch `_reads` will give; None inside one
        self._running: weakref.WeakSet[Generator[Pair]] = weakref.WeakSet()
        if data.num_workers:
            start_fork_server()

    def train(self, epoch: int, first: int = 0) -> Iterator[Pair]:
        """Start to read an epoch, or go on from the one before."""
        if first or self._next_epoch != epoch:
            requests = Endless(self._sampler, self.num_train, epoch, first)
            self._reads = iter(self._loader(self._reader("train"), requests))
        self._next_epoch = None
        return self._kept(self._epoch(self._reads, epoch, first))

    def test(self) -> Iterator[Pair]:
        """Start to read this replica's held-out images; damaged ones are left out."""
        requests = [Request(0, rows) for rows in self._sampler.test(self.num_test)]
        reads = iter(self._loader(self._reader("val"), requests))
        return self._kept(self._deliver(read, "val") for read in reads)

    def close(self) -> None:
        """Stop all workers."""
        for running in list(self._running):
            running.close()
        self._reads, self._next_epoch = iter(()), None

    def _kept(self, running: Generator[Pair]) -> Iterator[Pair]:
        self._running.add(running)
        return running

    def _epoch(self, reads: Iterator[Read], epoch: int, first: int) -> Generator[Pair]:
        for left in reversed(range(self._sampler.micro_batches(self.num_train) - first)):
            read = next(reads)
            if not left and reads is self._reads:  # before the last batch: who counts stops there
                self._next_epoch = epoch + 1
            yield self._deliver(read, "train")

    def _reader(self, split: str) -> ImageReader:
        training = split == "train"
        return ImageReader(
            self._train_files if training else self._test_files,
            side=self._side,
            crop_share=self._data.smallest_crop_share if training else self._data.test_crop_share,
            training=training,
            seed=self._sampler.seed,
            max_damaged=self.damage[split].most,
        )

    def _loader(self, reader: ImageReader, requests: Iterable[Request]) -> DataLoader[Read]:
        workers: dict[str, Any] = {
            "num_workers": self._data.num_workers,
            "prefetch_factor": self._data.prefetch_batches,
            "multiprocessing_context": START_METHOD,
            "worker_init_fn": begin_worker,
        }
        return DataLoader(
            reader,
            batch_size=None,  # a request is a whole batch
            sampler=requests,
            collate_fn=as_read,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # torch's own would lose a number for each loader
            **(workers if self._data.num_workers else {}),
        )

    def _deliver(self, read: Read, split: str) -> Pair:
        self.damage[split].add(read.damaged)
        return self._normalised(read.images), self._there(read.labels)

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _normalised(self, images: Tensor) -> Tensor:
        """(B, H, W, 3) uint8 here -> (B, 3, H, W) float32 on the device."""
        pixels = self._there(images).permute(0, 3, 1, 2)
        pixels = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return pixels.sub_(self._mean).div_(self._deviation)


@dataclass(frozen=True)
class Endless:
    """Requests for an epoch and all that follow; a class, since a loader takes no generator.

    The `first` ones of the first epoch are left out.
    """

    sampler: ReplicaSampler
    num_images: int
    from_epoch: int
    first: int = 0

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests of one epoch after the other, or none if a batch fills no epoch."""
        epochs = count(self.from_epoch) if self.sampler.micro_batches(self.num_images) else ()
        for epoch in epochs:
            rows_of_epoch = self.sampler.train(self.num_images, epoch)
            for rows in rows_of_epoch[self.first if epoch == self.from_epoch else 0 :]:
                yield Request(epoch, rows)
