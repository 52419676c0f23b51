"""Batches of a data set that lies on the device as a whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitsweep.spec.data import Batches

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
        labels: (N,) int64, or target fields (N, K, H, W) float32.
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
    ) -> None:
        """`prepare` is applied to the images of each batch (resizing)."""
        self.num_train, self.num_test = train.num_images, test.num_images
        self._train, self._test = train, test
        self._sampler, self._prepare = sampler, prepare

    def train(self, epoch: int, first: int = 0) -> Iterator[Pair]:
        """Yield the micro-batches of one epoch; its order is copied to the device once."""
        order = torch.from_numpy(self._sampler.train(self.num_train, epoch))
        order = order.to(self._train.images.device)
        # iterating over the tensor would make all views at once
        for index in range(first, len(order)):
            yield self._batch(self._train, order[index])

    def test(self) -> Iterator[Pair]:
        """Yield this replica's held-out images."""
        for indices in self._sampler.test(self.num_test):
            yield self._batch(self._test, torch.from_numpy(indices).to(self._test.images.device))

    def _batch(self, source: Images, indices: Tensor) -> Pair:
        images, labels = source.take(indices)
        return self._prepare(images), labels
