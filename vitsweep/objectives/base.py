"""What every objective has: batches, losses and scores (needs torch)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.generators import named_seed

if TYPE_CHECKING:
    from vitsweep.world import World

Batch = Mapping[str, Any]
"""Entries of a micro-batch; all tensors have its images along the first axis."""


class Pair(dict[str, Any]):
    """A batch `image` and `label` of what gives pairs; functions of the user's get the pair."""


_pytree.register_pytree_node(
    Pair,
    lambda pair: ([*pair.values()], [*pair]),
    lambda values, names: Pair(zip(names, values, strict=True)),
)


def as_entries(batch: Any) -> Batch:
    """Return a batch as a mapping: of a tuple `image`, `label`, and numbers for the rest."""
    if isinstance(batch, Mapping):
        return batch
    names = ["image", "label", *map(str, range(2, len(batch)))]
    return Pair(zip(names, batch, strict=False))


def as_given(batch: Batch) -> Any:
    """Return a batch as data or a loop gave it: the opposite of `as_entries`."""
    return tuple(batch.values()) if isinstance(batch, Pair) else batch


def at_least_float32(outputs: Tensor) -> Tensor:
    """Return floating-point outputs in float32 or what is wider, and others as they are."""
    if not outputs.is_floating_point():
        return outputs
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def described(value: Any) -> str:
    """Return what a function of the user's returned, for a message."""
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


class Sum(NamedTuple):
    """A part of a mean.

    Attributes:
        total: () sum of values.
        count: of the values: a number, or a tensor ().
    """

    total: Tensor
    count: Any


@dataclass(frozen=True, kw_only=True)
class Step:
    """Which step of a training, and which of its images, a batch belongs to.

    Random numbers belong to an image and not to a rank: they follow from seed, purpose, step and the image's
    place in the batch of all replicas. Ranks that share an image, and every split over ranks and
    micro-batches, draw alike. All are float32: in another dtype they would be other numbers.

    Attributes:
        seed: of the cell.
        number: optimizer steps before it.
        total: optimizer steps of the whole training; None in `task=measure`.
        first: place of the batch's first image in the batch of all replicas; others follow it.
        num_images: of that batch of all replicas.
        device: of the tensors.
        world: ranks, over whose replicas a loss that couples images takes its statistics; None where this
            process has all images, as the reference does.
        of_held_out: the images are held-out ones, and places those of the test order.
    """

    seed: int
    number: int
    total: int | None
    first: int
    num_images: int
    device: torch.device
    world: "World | None" = None
    of_held_out: bool = False

    @classmethod
    def of(
        cls, cell: CellSpec, world: "World", number: int, total: int | None, micro_batch: int
    ) -> "Step":
        """Return the place of one of a rank's micro-batches, counted from 0, in a step."""
        before = world.data_parallel_rank * cell.batch.accumulation_steps + micro_batch
        return cls(
            seed=cell.seed,
            number=number,
            total=total,
            first=before * cell.micro_batch,
            num_images=cell.images_per_step,
            device=world.device,
            world=world,
        )

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator that is the same on every rank, of this purpose and step."""
        return torch.Generator(self.device).manual_seed(self._seed(purpose))

    def uniform(self, purpose: str, images: int, *shape: int) -> Tensor:
        """Return (images, *shape) float32 numbers of [0, 1): small ones, drawn for all places and cut."""
        size, drawn = (self.num_images, *shape), self.generator(purpose)
        found = torch.rand(size, generator=drawn, device=self.device, dtype=torch.float32)
        return found[self.first : self.first + images]

    def normal(self, purpose: str, images: int, *shape: int) -> Tensor:
        """Return (images, *shape) float32 numbers of a standard normal distribution, as `uniform` does."""
        size, drawn = (self.num_images, *shape), self.generator(purpose)
        found = torch.randn(size, generator=drawn, device=self.device, dtype=torch.float32)
        return found[self.first : self.first + images]

    def noise(self, purpose: str, images: int, *shape: int) -> Tensor:
        """Return (images, *shape) float32 noise as large as an image: each place has a seed of its own."""
        found = torch.empty(images, *shape, device=self.device, dtype=torch.float32)
        generator = torch.Generator(self.device)
        for index, image in enumerate(found):
            generator.manual_seed(self._seed(f"{purpose} {self.first + index}"))
            image.normal_(generator=generator)
        return found

    def _seed(self, purpose: str) -> int:
        at = "held out" if self.of_held_out else f"step {self.number}"
        return named_seed(self.seed, f"{purpose} {at}")


class OpenObjective(ABC):
    """An objective at work: what is added to a network, and how batches become losses and scores.

    Args:
        cell: whose objective it is.

    Attributes:
        cell: the same.
        settings: the objective as it was typed.
        dtype: of what `prepare` adds, and of losses: float32, or float64 where parameters are.
    """

    settings: Any

    reduction: Literal["mean", "weighted_mean", "sum"] = "mean"
    """What `loss` returns of a micro-batch, and how those of all replicas become that of a step.

    - `mean`: means, which all weigh alike; nothing is exchanged.
    - `weighted_mean`: means, which weigh as `count` says.
    - `sum`: sums, whose total is divided by the total of `count`.
    """

    momentum: Callable[[int, int | None], float] | None = None
    """Of a teacher: (optimizer step, steps of the training) -> decay of the moving average of all weights.

    In each step the network runs with the averages, without gradients, on `of_teacher` of the batch, before
    it runs with its weights. What it returns is the batch's entry `teacher`, in float32 or wider.
    """

    def __init__(self, cell: CellSpec) -> None:
        self.cell, self.settings = cell, cell.objective
        own = getattr(torch, cell.precision.plan().param_dtype)
        self.dtype: torch.dtype = torch.promote_types(own, torch.float32)

    def network(self, model: nn.Module) -> nn.Module:
        """Return a reference model with what the objective adds to it, on the model's device."""
        return model

    def example(self, number: int, generator: torch.Generator) -> Batch:
        """Return a batch of so many images with something to learn: for the proof, memory and FLOPs."""
        shape = (number, *self.cell.model.input_shape(self.cell.batch.resolution_px))
        return {"image": torch.randn(shape, generator=generator)}

    def prepare(self, batch: Batch, step: Step) -> Batch:
        """Return what the network and the loss read: noise, masks, views; on the device, without gradients.

        The network is called with those entries of a mapping that its `forward` names; of a `Pair` with
        the first.
        """
        return batch

    def of_teacher(self, batch: Batch) -> Batch:
        """Return what a teacher sees of a prepared batch."""
        return batch

    def count(self, batch: Batch) -> Any:
        """Return over how many values the loss of a micro-batch is taken: a number or a tensor ()."""
        raise NotImplementedError

    def divisors(self, micro_batches: Sequence[Batch], world: "World") -> list[Tensor]:
        """Return by what the loss of each micro-batch is divided, on the device; every rank calls it.

        Sums are divided by N / R, for a count of N over R ranks, over which their gradients are averaged;
        means by N / (R C), which is the number of micro-batches where all count the same C.
        """
        like = torch.zeros((), device=world.device, dtype=torch.float64)
        counts = torch.stack(
            [
                n.to(like) if isinstance(n, Tensor) else torch.full_like(like, n)  # without a copy
                for n in map(self.count, micro_batches)
            ]
        )
        total = counts.sum()
        if dist.is_initialized():  # ranks that share images count alike: N / R is the same over all
            dist.all_reduce(total)
        parts = torch.ones_like(counts) if self.reduction == "sum" else counts
        return [*(total / (world.size * parts)).to(self.dtype)]

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch, step: Step) -> Tensor:
        """Return the loss () of a micro-batch, as `reduction` says; outputs are float32 or wider."""

    def score(self, outputs: Any, batch: Batch, step: Step) -> Mapping[str, Sum]:
        """Return a batch's part in those of the objective's `scores` that are means over held-out images."""
        return {}

    def evaluate(
        self,
        predict: Callable[[Batch], Any],
        batches: Iterable[tuple[Batch, Step]],
        device: torch.device,
    ) -> dict[str, float]:
        """Return the objective's `scores`, in which each held-out image counts once; every rank calls it.

        Args:
            predict: gives outputs of a prepared batch, without gradients.
            batches: this replica's held-out ones, with their places in the test order.
            device: of them.
        """
        totals, none = dict[str, Tensor](), torch.zeros(0, 2, device=device, dtype=torch.float64)
        for batch, at in batches:
            batch = self.prepare(batch, at)
            outputs = _pytree.tree_map_only(Tensor, at_least_float32, predict(batch))
            for name, part in self.score(outputs, batch, at).items():
                own = torch.stack([torch.as_tensor(value).to(none) for value in part])[None]
                own = own.masked_fill(own[:, 1:] == 0, 0)  # NaN, where all images are damaged
                totals[name] = totals[name] + own if name in totals else own
        sums = torch.cat([none, *totals.values()])
        if dist.is_initialized():
            dist.all_reduce(sums)  # ranks that share an image count it equally often
        return dict(zip(totals, (sums[:, 0] / sums[:, 1]).tolist(), strict=True))

    def flags(self, scores: Mapping[str, float]) -> Mapping[str, bool]:
        """Return validity flags of a training, of the scores of its last evaluation."""
        return {}

    def reference(self) -> "OpenObjective":
        """Return a second, slow implementation, which shares no code with this one.

        The proof computes `network`, `prepare` and `loss` of it. Without one the loss is compared with
        itself, and the record says so.
        """
        return self
