"""Batches of a data set that lies on the device as a whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitsweep.data.replica_sampler import ReplicaSampler
from vitsweep.spec.data import Batches

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
        for index in range(
            first, len(order)
        ):  # iterating over the tensor would make all views at once
            yield self._batch(self._train, order[index])

    def test(self) -> Iterator[Pair]:
        """Yield this replica's held-out images."""
        for indices in self._sampler.test(self.num_test):
            yield self._batch(self._test, torch.from_numpy(indices).to(self._test.images.device))

    def _batch(self, source: Images, indices: Tensor) -> Pair:
        images, labels = source.take(indices)
        return self._prepare(images), labels
