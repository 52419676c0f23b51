"""Batches that worker processes read from files while the model trains."""

import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from vitsweep.data.damage import Damage
from vitsweep.data.folder_scan import files
from vitsweep.data.image_folder import ImageFolder
from vitsweep.data.image_reader import ImageReader, Read, Request
from vitsweep.data.share import Share
from vitsweep.data.workers import START_METHOD, as_read, begin_worker, start_fork_server
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Batches
from vitsweep.world import World

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's training images per channel, on a scale from 0 to 1 (torchvision's constants)."""

Pair = tuple[Tensor, Tensor]


def open_image_folder(data: ImageFolder, cell: CellSpec, world: World) -> "LoadedBatches":
    """Return batches of a folder on this rank's device; reading starts with `train` or `test`."""
    return LoadedBatches(data, Share.of(cell, world), cell.batch.resolution_px, world.device)


class LoadedBatches(Batches):
    """Batches out of a DataLoader.

    `next()` returns at once if a batch is ready and waits for the workers otherwise: its time is
    how late the data are, plus the launch of transfer and normalisation. Workers start anew with
    every epoch and every test, so that an epoch may be left half way.

    Attributes:
        damage: what could not be read so far, by split.
    """

    def __init__(self, data: ImageFolder, share: Share, side: int, device: torch.device) -> None:
        assert data.folder is not None, "refused when the cell was made"
        self._train_files, self._test_files = (files(data.folder, s) for s in ("train", "val"))
        self.num_train, self.num_test = len(self._train_files), len(self._test_files)
        self.damage = {
            split: Damage(count, data.max_damaged_share)
            for split, count in (("train", self.num_train), ("val", self.num_test))
        }
        self._data, self._share, self._side, self._device = data, share, side, device
        self._mean = 255 * torch.tensor(MEAN, device=device).view(3, 1, 1)
        self._deviation = 255 * torch.tensor(DEVIATION, device=device).view(3, 1, 1)
        self._running: weakref.WeakSet[Generator[Pair]] = weakref.WeakSet()
        if data.num_workers:
            start_fork_server()

    def train(self, epoch: int) -> Iterator[Pair]:
        """Start to read an epoch."""
        requests = [Request(epoch, rows) for rows in self._share.train(self.num_train, epoch)]
        return self._start("train", requests)

    def test(self) -> Iterator[Pair]:
        """Start to read this replica's held-out images; damaged ones are left out."""
        return self._start("val", [Request(0, rows) for rows in self._share.test(self.num_test)])

    def close(self) -> None:
        """Stop all workers."""
        for running in list(self._running):
            running.close()

    def _start(self, split: str, requests: list[Request]) -> Iterator[Pair]:
        running = self._deliver(iter(self._loader(self._reader(split), requests)), split)
        self._running.add(running)
        return running

    def _reader(self, split: str) -> ImageReader:
        training = split == "train"
        return ImageReader(
            self._train_files if training else self._test_files,
            side=self._side,
            crop_share=self._data.smallest_crop_share if training else self._data.test_crop_share,
            training=training,
            seed=self._share.seed,
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
            generator=torch.Generator(),  # torch's own would lose a number for each epoch
            **(workers if self._data.num_workers else {}),
        )

    def _deliver(self, reads: Iterator[Read], split: str) -> Generator[Pair]:
        for read in reads:
            self.damage[split].add(read.damaged)
            yield self._normalised(read.images), self._there(read.labels)

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _normalised(self, images: Tensor) -> Tensor:
        """(B, H, W, 3) uint8 here -> (B, 3, H, W) float32 on the device."""
        pixels = self._there(images).permute(0, 3, 1, 2)
        pixels = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        return pixels.sub_(self._mean).div_(self._deviation)
