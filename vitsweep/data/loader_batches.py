"""Batches that worker processes read while the model trains."""

import multiprocessing
import os
import signal
import threading
import weakref
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing import forkserver
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitsweep.data.batches import ReplicaSampler
from vitsweep.files import make_socket_folder
from vitsweep.spec.data import Batches
from vitsweep.spec.generators import named_seed

# Processes that read ahead, started so that they can neither hang nor outlive their rank.
#
# Workers come from a fork server of the rank's own: a process forked from the rank itself would copy
# the locks of threads that it does not have (OpenMP after the first parallel operation, gloo, NCCL),
# and hang in the first of them that was held. The server has imported torch once, so that a worker
# starts in some milliseconds.


START_METHOD = "forkserver"


def start_fork_server() -> None:
    """Let the server import torch while the rank builds its model."""
    forkserver.set_forkserver_preload(["torch", "vitsweep.data.image_loader"])
    make_socket_folder()
    forkserver.ensure_running()


def begin_worker(worker: int) -> None:
    """Set up a worker: it ignores Ctrl-C, which the rank handles, and ends when the rank ends.

    A worker is a child of the server, so that torch's own watch over the parent's process id never
    sees the rank die.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank, daemon=True).start()


def _end_with_rank() -> None:
    rank = multiprocessing.parent_process()
    if rank is not None:
        rank.join()
        os._exit(1)


def as_read(batch: Any) -> Any:
    """Collate nothing: the reader returns whole batches."""
    return batch


Pair = tuple[Tensor, Tensor]
Batch = TypeVar("Batch")


class LoaderBatches(Batches, Generic[Batch]):
    """Batches that a DataLoader's workers read.

    `next()` returns at once if a batch is ready and waits for the workers otherwise: its time is
    how late the data are, plus the launch of transfer and normalisation. Workers read across the
    border of epochs; where epochs do not follow one another, or one is left half way, they start
    anew. A subclass sets `num_train` and `num_test`.

    Args:
        sampler: of this replica.
        device: where batches are delivered.
        num_workers: processes that read; 0 reads in the rank itself.
        prefetch_batches: micro-batches that each worker prepares ahead.
    """

    def __init__(
        self, sampler: ReplicaSampler, device: torch.device, num_workers: int, prefetch_batches: int
    ) -> None:
        self._sampler, self._device = sampler, device
        self._num_workers, self._prefetch_batches = num_workers, prefetch_batches
        self.prefetched = num_workers * prefetch_batches
        self._reads: Iterator[Batch] = iter(())
        self._next_epoch: int | None = None  # whose first batch `_reads` will give; None inside one
        self._running: weakref.WeakSet[Generator[Pair]] = weakref.WeakSet()
        if num_workers:
            start_fork_server()

    @abstractmethod
    def reader(self, *, training: bool) -> Dataset[Batch]:
        """Return what reads a `Request` of one split, in a worker."""

    @abstractmethod
    def deliver(self, read: Batch, *, training: bool) -> Pair:
        """Return a batch that was read as images and labels on the device."""

    def train(self, epoch: int, first: int = 0) -> Iterator[Pair]:
        """Start to read an epoch, or go on from the one before."""
        if first or self._next_epoch != epoch:
            requests = Endless(self._sampler, self.num_train, epoch, first)
            self._reads = self.start_reading(self.reader(training=True), requests)
        self._next_epoch = None
        return self._kept(self._epoch(self._reads, epoch, first))

    def test(self) -> Iterator[Pair]:
        """Start to read this replica's held-out images; damaged ones are left out."""
        requests = [Request(0, rows) for rows in self._sampler.test(self.num_test)]
        reads = self.start_reading(self.reader(training=False), requests)
        return self._kept(self.deliver(read, training=False) for read in reads)

    def close(self) -> None:
        """Stop all workers, which end with their iterators."""
        for running in list(self._running):
            running.close()
        self._reads, self._next_epoch = iter(()), None

    def _kept(self, running: Generator[Pair]) -> Iterator[Pair]:
        self._running.add(running)
        return running

    def _epoch(self, reads: Iterator[Batch], epoch: int, first: int) -> Generator[Pair]:
        for left in reversed(range(self._sampler.micro_batches(self.num_train) - first)):
            read = next(reads)
            if not left and reads is self._reads:  # before the last batch: who counts stops there
                self._next_epoch = epoch + 1
            yield self.deliver(read, training=True)

    def start_reading(
        self, reader: Dataset[Batch], requests: Iterable["Request"]
    ) -> Iterator[Batch]:
        """Start to read; return what was read, in the order of the requests."""
        workers: dict[str, Any] = {
            "num_workers": self._num_workers,
            "prefetch_factor": self._prefetch_batches,
            "multiprocessing_context": START_METHOD,
            "worker_init_fn": begin_worker,
        }
        loader = DataLoader(
            reader,
            batch_size=None,  # a request is a whole batch
            sampler=requests,
            collate_fn=as_read,
            pin_memory=self._device.type == "cuda",
            # torch's own would lose a number for each loader
            generator=torch.Generator().manual_seed(named_seed(self._sampler.seed, "loader")),
            **(workers if self._num_workers else {}),
        )
        return iter(loader)

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


class Request(NamedTuple):
    """Images to read: some rows of a split, in one epoch."""

    epoch: int
    rows: NDArray[np.int64]


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
