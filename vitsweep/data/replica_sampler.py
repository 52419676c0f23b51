"""Which images a replica sees: the same global batches whatever the number of replicas."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World

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
