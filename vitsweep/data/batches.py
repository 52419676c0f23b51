"""Batches of a data set that lies on the device, or that worker processes read while the model trains."""

import multiprocessing
import os
import shutil
import signal
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing import connection, forkserver
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitsweep.errors import VitsweepError
from vitsweep.files import make_socket_folder
from vitsweep.interpreters import like_this_one
from vitsweep.spec.data import Batches
from vitsweep.spec.generators import named_seed

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


# Which images a replica sees: the same global batches whatever the number of replicas.


Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ReplicaSampler:
    """One replica's part of every global batch.

    Global batch i is images [i G, (i + 1) G) of the epoch's order. It is cut contiguously into
    replicas and each part contiguously into micro-batches, so that the union over both is the same
    G images for every arrangement: equality of techniques is tested on that.

    Attributes:
        replica: which share, below `replicas`.
        replicas: ranks that see different images.
        micro_batch: images of one forward pass on one replica.
        accumulation_steps: micro-batches per optimizer step.
        seed: decides the order of every epoch, together with its number.
    """

    replica: int
    replicas: int
    micro_batch: int
    accumulation_steps: int
    seed: int

    @classmethod
    def of(cls, cell: "CellSpec", world: "World") -> "ReplicaSampler":
        """Return the sampler of this rank; ranks that share an image have the same one."""
        return cls(
            replica=world.data_parallel_rank,
            replicas=world.data_parallel_size,
            micro_batch=cell.micro_batch,
            accumulation_steps=cell.batch.accumulation_steps,
            seed=cell.seed,
        )

    @property
    def images_per_step(self) -> int:
        """Images of one optimizer step over all replicas."""
        return self.replicas * self.accumulation_steps * self.micro_batch

    def micro_batches(self, num_images: int) -> int:
        """Return the number of micro-batches of an epoch on this replica."""
        return num_images // self.images_per_step * self.accumulation_steps

    def train(self, num_images: int, epoch: int) -> Indices:
        """Return the images of an epoch as (micro-batches, micro_batch), remainder dropped."""
        order = np.random.default_rng((self.seed, epoch)).permutation(num_images)
        steps = num_images // self.images_per_step
        shape = (steps, self.replicas, self.accumulation_steps, self.micro_batch)
        own = order[: steps * self.images_per_step].reshape(shape)[:, self.replica]
        return np.ascontiguousarray(own.reshape(-1, self.micro_batch))

    def test(self, num_images: int) -> Iterator[Indices]:
        """Yield this replica's batches of the held-out images, in order.

        Every image is on exactly one replica, and every replica has the same number of batches:
        a forward pass of a sharded model is a collective. What does not fill a round of batches is
        dealt out evenly; where it does not reach every replica, it joins the round before.
        """
        whole = self.replicas * self.micro_batch
        rounds, rest = divmod(num_images, whole)
        if rest < self.replicas and rounds:
            rounds, rest = rounds - 1, rest + whole
        everything = np.arange(num_images)
        for first in range(0, rounds * whole, whole):
            yield everything[first : first + whole].reshape(self.replicas, -1)[self.replica]
        if rest:
            yield np.array_split(everything[rounds * whole :], self.replicas)[self.replica]


Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Images:
    """Images and labels on the device.

    Attributes:
        images: (N, C, H, W) float32.
        labels: (N,) int64.
        num_images: length of an epoch; beyond N the images come round again.
    """

    images: Tensor
    labels: Tensor
    num_images: int

    def take(self, indices: Tensor) -> Pair:
        """Return copies of some images and their labels."""
        rows = indices % len(self.images) if self.num_images > len(self.images) else indices
        return self.images[rows], self.labels[rows]


class DeviceBatches(Batches):
    """Batches indexed out of tensors on the device, and resized there where needed."""

    def __init__(
        self,
        train: Images,
        test: Images,
        sampler: ReplicaSampler,
        prepare: Callable[[Tensor], Tensor] = lambda images: images,
        texts: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Open parts that lie on the device.

        Args:
            train: images to train on.
            test: held-out images.
            sampler: which of them are whose.
            prepare: what is done to the images of each batch (resizing).
            texts: (N, L, width), and (N,), how many of the L vectors are text: what labels are numbers of.
        """
        self.num_train, self.num_test = train.num_images, test.num_images
        self._train, self._test = train, test
        self._sampler, self._prepare, self._texts = sampler, prepare, texts

    def train(self, epoch: int, first: int = 0) -> Iterator[Any]:
        """Yield the micro-batches of one epoch; its order is copied to the device once."""
        order = torch.from_numpy(self._sampler.train(self.num_train, epoch))
        order = order.to(self._train.images.device)
        # iterating over the tensor would make all views at once
        for index in range(first, len(order)):
            yield self._batch(self._train, order[index])

    def test(self) -> Iterator[Any]:
        """Yield this replica's held-out images."""
        for indices in self._sampler.test(self.num_test):
            yield self._batch(self._test, torch.from_numpy(indices).to(self._test.images.device))

    def _batch(self, source: Images, indices: Tensor) -> Any:
        images, labels = source.take(indices)
        images = self._prepare(images)
        if self._texts is None:
            return images, labels
        vectors, lengths = self._texts
        return {"image": images, "text": vectors[labels], "text_length": lengths[labels]}


# Processes that read ahead, started so that they can neither hang nor outlive their rank.
#
# Workers come from a fork server of the rank's own: a process forked from the rank itself would copy
# the locks of threads that it does not have (OpenMP after the first parallel operation, gloo, NCCL),
# and hang in the first of them that was held. The server has imported torch once, so that a worker
# starts in some milliseconds.


START_METHOD = "forkserver"
SHARED_MEMORY, MIB = "/dev/shm", 2**20
"""Where workers leave tensors for their rank."""
MOST_SECONDS = 5.0
"""For the fork server to report how a worker ended whose connection broke."""


def start_fork_server() -> None:
    """Let the server import torch while the rank builds its model."""
    forkserver.set_forkserver_preload(["torch", "vitsweep.data.image_loader"])
    make_socket_folder()
    with like_this_one():
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


Batch = TypeVar("Batch")


class LoaderBatches(Batches, Generic[Batch]):
    """Batches that a DataLoader's workers read.

    `next()` returns at once if a batch is ready and waits for the workers otherwise: its time is
    how late the data are, plus the launch of transfer and normalisation. Workers read across the
    border of epochs; where epochs do not follow one another, or one is left half way, they start
    anew. A subclass sets `num_train` and `num_test`.

    Args:
        cell: says which images a micro-batch has.
        world: of this rank, on whose device batches are delivered.
        num_workers: processes that read; 0 reads in the rank itself.
        prefetch_batches: micro-batches that each worker prepares ahead.
    """

    def __init__(
        self, cell: "CellSpec", world: "World", num_workers: int, prefetch_batches: int
    ) -> None:
        self._sampler, self._device = ReplicaSampler.of(cell, world), world.device
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
        return _while_workers_live(iter(loader))

    def _there(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)


def _while_workers_live(reads: Iterator[Batch]) -> Iterator[Batch]:
    """Yield what workers read.

    Raises:
        VitsweepError: a worker died; the text says by which signal.
    """
    try:
        yield from reads
    except (RuntimeError, ConnectionError, EOFError) as error:  # which give a process id at most
        workers = getattr(reads, "_workers", ())
        if not isinstance(error, RuntimeError):  # a worker that dies is reported a little later
            connection.wait([worker.sentinel for worker in workers], timeout=MOST_SECONDS)
        code = next(filter(None, (worker.exitcode for worker in workers)), 0)
        if not code:
            raise
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with code {code}"
        shared = shutil.disk_usage(SHARED_MEMORY)
        raise VitsweepError(
            f"A worker process that reads data {end}. The kernel sends SIGKILL where memory runs out, and "
            f"SIGBUS where `{SHARED_MEMORY}` is full, of which {shared.free // MIB:,} of "
            f"{shared.total // MIB:,} MiB are free: use fewer `data.num_workers` or less "
            "`data.prefetch_batches`, or a container with more shared memory (`--shm-size`)."
        ) from error


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
