"""Trainer: a parallelized model with its optimizer, and one optimizer step."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from vitsweep.errors import VitsweepError
from vitsweep.model.initialize import WRAPPERS, Draws
from vitsweep.model.module_look import inputs_of, logits_of
from vitsweep.model.precision import autocast
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import PrecisionPlan
from vitsweep.training.regularize import StochasticDepth
from vitsweep.training.update import LocalShards, LossScaler, MasterWeights, clip_gradients
from vitsweep.world import World

if TYPE_CHECKING:
    from vitsweep.techniques.averaging.ema import MovingAverage
    from vitsweep.techniques.pipeline_parallel.runner import PipelineRunner

MicroBatch = tuple[Tensor, Tensor]
"""Images (B, C, H, W) and labels (B,) or shares of classes (B, classes)."""
Criterion = Callable[[Any, Any], Tensor]
"""(outputs, batch) -> mean loss, or the sum with a count."""
Count = Callable[[Any], Any]
"""(batch) -> over how many values its loss is a mean: a number, or a tensor of one."""
IGNORED = -100
"""The label of which `torch.nn.functional.cross_entropy` takes no notice."""


class PhaseMarks(Protocol):
    """Marks the end of each phase of a step (see `training.timed_steps`)."""

    def end(self, phase: str) -> None:
        """The named phase ends here."""


class _NoMarks:
    def end(self, phase: str) -> None:
        pass


@dataclass(kw_only=True)
class Trainer:
    """A model wrapped by all techniques, and how one optimizer step of it runs.

    Attributes:
        model: wrapped by all techniques.
        pipeline: runs batches through the stages, where the model is in stages.
        optimizer: over the model's (sharded) parameters, or over their masters.
        masters: float32 copies, where the plan asks for them and the sharding keeps none.
        local_shards: what the optimizer updates in place of DTensors, where it can.
        scaler: loss scaling, where the plan asks for it.
        skipped: per step, 1 where an overflow made all ranks skip the update; on the device.
        draws: random choices of the forward passes.
        depth: leaves out branches for some images, where the recipe asks for it.
        average: of the weights, where `averaging` asks for it.
        steps_taken: optimizer steps so far; whoever resumes a training sets it.
        non_finite: whether any loss so far was inf or NaN; on the device, so that no step waits.
        before_update: called when gradients are averaged, unscaled and clipped.
        names: name without those of wrappers (`module`) -> name in the model as it was given.
        own_loss: (outputs, batch) -> mean loss, in place of the cell's; batches may then be mappings.
        count: of a micro-batch, where these may count differently: the loss of a step is then the sum over
            all micro-batches of all replicas, divided by their count. None takes the mean of their means.
        is_averaged: whether the model has its averaged weights.
    """

    cell: CellSpec
    world: World
    plan: PrecisionPlan
    model: nn.Module
    pipeline: "PipelineRunner | None"
    optimizer: Optimizer
    masters: MasterWeights | None
    local_shards: LocalShards | None
    scaler: LossScaler | None
    skipped: list[Tensor]
    non_finite: Tensor
    draws: Draws
    depth: StochasticDepth | None = None
    average: "MovingAverage | None" = None
    steps_taken: int = 0
    before_update: Callable[[], object] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    own_loss: Criterion | None = None
    count: Count | None = None
    is_averaged: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._collection = ScheduledCollection(self.cell.runtime.collect_every_steps)

    def step(self, batches: Iterator[MicroBatch], marks: PhaseMarks | None = None) -> Tensor:
        """Train on one optimizer step's micro-batches.

        Returns:
            The mean loss over this rank's images, detached, still on the device. Where micro-batches are
            counted it is this replica's share, whose mean over the replicas is the loss of the step.
        """
        marks = marks or _NoMarks()
        if self.depth:
            self.depth.draw(self.steps_taken)
        try:
            with self._own_random_numbers():
                total = self.gradients(batches, marks)
        except BaseException:  # a loop that goes on must not add to half of a step's gradients
            self.cell.sharding.drop_gradients(self.model)  # before the optimizer's shards have them
            self._drop_gradients()
            raise
        self.update()
        self.non_finite |= ~torch.isfinite(total)
        marks.end("optimizer")
        self._collection.after_step()
        return total

    def gradients(self, batches: Iterator[MicroBatch], marks: PhaseMarks | None = None) -> Tensor:
        """Add the gradients of one step's micro-batches; return the mean loss as `step` does."""
        marks = marks or _NoMarks()
        micro_batches = self.cell.batch.accumulation_steps
        self.cell.compilation.begin_step()
        total = torch.zeros((), device=self.world.device, dtype=torch.float64)
        self.draws.begin(self.steps_taken)
        divisors: list[Any] = [micro_batches] * micro_batches
        if self.count:
            taken = list(islice(batches, micro_batches))
            batches, divisors = iter(taken), self._divisors(taken)
        for index, divisor in enumerate(divisors):
            batch = next(batches)
            if self.depth:
                self.depth.select(index)
            marks.end("data")
            with self._sync(index == micro_batches - 1):
                total += self._add_gradients(batch, divisor, marks)
            marks.end("backward")
        self.cell.sequence_parallel.complete_gradients(self.model, self.world)
        self.cell.sharding.complete_gradients(self.model)
        marks.end("backward")
        return total

    def _divisors(self, micro_batches: list[Any]) -> list[Tensor]:
        """Return by what the loss of each micro-batch is divided, on the device.

        Sums by N / R, for a count of N over R replicas, over which their gradients are averaged; means by
        N / (R C), which is the number of micro-batches where all count the same C.
        """
        assert self.count is not None
        counts = torch.stack([self._counted(self.count(batch)) for batch in micro_batches])
        total = counts.sum()
        if (
            dist.is_initialized()
        ):  # ranks that share images count them alike: N / R is the same over all
            dist.all_reduce(total)
        parts = counts if self.count is number_of_items else torch.ones_like(counts)
        dtype = torch.promote_types(getattr(torch, self.plan.param_dtype), torch.float32)
        return [*(total / (self.world.size * parts)).to(dtype)]

    def _counted(self, count: Any) -> Tensor:
        if isinstance(count, Real):  # NumPy's too
            count = torch.tensor(float(count), device=self.world.device)
        if not isinstance(count, Tensor) or count.shape:
            raise VitsweepError(
                f"The count of the loss returned {described(count)}, and it must be one number: over how "
                "many values of the micro-batch the loss is a sum, such as `mask.sum()`."
            )
        return count.to(self.world.device, torch.float64)

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of one micro-batch, in float32 or better."""
        with self._autocast():
            outputs = self._outputs(batch)
        return self.criterion(outputs, batch)

    def criterion(self, outputs: Any, batch: Any) -> Tensor:
        """Return the mean loss of what the model returned, or the sum with a count of the loss's own.

        Raises:
            VitsweepError: a loss of the user's is no number.
        """
        if self.own_loss is None:
            criterion = criterion_of(self.cell, sums=bool(self.count))
            return criterion(logits_of(outputs), labels_of(self.cell, batch))
        loss = self.own_loss(tree_map_only(Tensor, at_least_float32, outputs), batch)
        if not isinstance(loss, Tensor) or loss.shape:
            kind = "mean" if self.count in (None, number_of_items) else "sum"
            raise VitsweepError(
                f"The loss returned {described(loss)}, and it must be a tensor of one number without an "
                f"axis, the {kind} over the micro-batch: return `loss.{kind}()`."
            )
        return loss

    def _outputs(self, batch: Any) -> Any:
        """Call the model with the images, or with those entries of a mapping that its `forward` names."""
        if not isinstance(batch, Mapping):
            return self.model(self.cast(batch[0]))
        inputs = inputs_of(unwrapped(self.model), batch)
        floating = {
            k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()
        }
        return self.model(**inputs | {k: self.cast(value) for k, value in floating.items()})

    def predict(self, batch: Any) -> Any:
        """Return outputs of a batch without gradients; only its inputs are read."""
        if self.pipeline:
            return self.pipeline.predict(self.cast(batch[0]))
        with torch.no_grad(), self._autocast():
            return self._outputs(batch)

    def _add_gradients(self, batch: Any, divisor: Any, marks: PhaseMarks) -> Tensor:
        """Run forward and backward; return this micro-batch's part of the mean loss."""
        scale = self.scaler.scale if self.scaler else lambda loss: loss
        if self.pipeline:
            images, labels = batch
            sums_by = divisor if self.count else None
            return self.pipeline.run(self.cast(images), labels, scale, marks.end, sums_by)
        loss = self.loss(batch) / divisor
        marks.end("forward")
        scale(loss).backward()
        return loss.detach()

    def update(self) -> None:
        """Unscale, clip, let the optimizer step, and forget the gradients."""
        if self.masters:
            self.masters.take_gradients()
        if self.local_shards:
            self.local_shards.take_gradients()
        if self.scaler:
            self.skipped.append(self.scaler.unscale(self.optimizer))
        self._clip()
        if self.before_update:
            self.before_update()
        if self.scaler:
            self.scaler.step(self.optimizer)
        else:
            self.optimizer.step()
        self.publish()
        if self.average:
            self.average.update(self.steps_taken)
        self._drop_gradients()
        self.steps_taken += 1

    def _drop_gradients(self) -> None:
        if self.masters:
            self.masters.zero_model_gradients()
        self.optimizer.zero_grad()
        if self.local_shards:
            self.local_shards.drop_gradients()

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Context in which the model has its averaged weights, where there are any: for evaluation.

        Every rank enters it: shardings that keep whole weights on every rank gather them.
        """
        if self.average is None:
            yield
            return
        self.average.enter()
        self.is_averaged = True
        self.publish()
        try:
            yield
        finally:
            self.average.leave()
            self.is_averaged = False
            self.publish()
            self.reshard()  # what is still gathered holds averages

    def reshard(self) -> None:
        """Free what FSDP left gathered: a forward pass without a backward leaves its root so."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def publish(self) -> None:
        """Copy the masters or slices of the optimizer into the model; every rank calls it."""
        if self.masters:
            self.masters.publish()
        self.cell.sharding.complete_update(self.model)

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient that the optimizer is given for a parameter; every rank calls it."""

        def held(parameter: nn.Parameter) -> Tensor | None:
            return (self.masters.of(parameter) if self.masters else parameter).grad

        if self.cell.sharding.skips(self.model, parameter):
            return None
        return self.cell.sharding.gradient_of(self.model, parameter, held)

    def _clip(self) -> None:
        limit = self.cell.optimizer.clip_norm
        if limit is not None:
            sharded = self.local_shards and self.local_shards.sharded_groups
            clip_gradients(
                sharded or self.optimizer.param_groups,  # shards know over which ranks they lie
                limit,
                self.world,
                in_slices=self.cell.sharding.shards_optimizer,
            )

    def _sync(self, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        if self.pipeline:  # torch's schedules exchange gradients after the last of their own
            return nullcontext()
        return self.cell.sharding.gradient_sync(self.model, is_last_micro_batch)

    def _own_random_numbers(self) -> AbstractContextManager[None]:
        """Let a user's module draw numbers of this replica and step."""
        if not self.cell.model.draws_by_itself:
            return nullcontext()
        self.draws.step = self.steps_taken
        return self.draws.default_generators(self.world.device)

    def _autocast(self) -> AbstractContextManager[object]:
        return autocast(self.plan, self.world.device)

    def cast(self, images: Tensor) -> Tensor:
        """Return inputs in the dtype and memory format of the model."""
        if images.dtype in (torch.int64, torch.int32):
            return images  # tokens
        images = images.to(getattr(torch, self.plan.param_dtype))
        if self.cell.layout.channels_last and images.ndim == 4:
            images = images.contiguous(memory_format=torch.channels_last)
        return images


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside of the wrappers of sharding and compilation."""
    for name in WRAPPERS:
        if name in model._modules and len(model._modules) == 1:
            return unwrapped(model._modules[name])  # type: ignore[arg-type]
    return model


def described(value: Any) -> str:
    """Return what a function of the user's returned, for a message."""
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def labels_of(cell: CellSpec, batch: Any) -> Tensor:
    """Return the labels (B,) of a pair, or the entry of a mapping that `data.label` names."""
    at: Any = getattr(cell.data, "label", None) if isinstance(batch, Mapping) else 1
    labels: Tensor = batch[at]
    return labels


def at_least_float32(outputs: Tensor) -> Tensor:
    """Return floating-point outputs in float32 or what is wider, and others as they are."""
    if not outputs.is_floating_point():
        return outputs
    return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def criterion_of(cell: CellSpec, *, sums: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (outputs, labels) -> mean loss, or its sum (see `count_of`), in float32 or better."""
    reduction = "sum" if sums else "mean"

    def criterion(outputs: Tensor, labels: Tensor) -> Tensor:
        outputs = at_least_float32(outputs)
        if labels.is_floating_point():  # shares of the classes, of mixed images
            labels = labels.to(outputs.dtype)
        smoothing = cell.task.label_smoothing
        return F.cross_entropy(outputs, labels, label_smoothing=smoothing, reduction=reduction)

    return criterion


def count_of(cell: CellSpec) -> Count:
    """Return (batch) -> over how many values the mean of `criterion_of` is taken."""

    def count(batch: Any) -> Any:
        labels = labels_of(cell, batch)
        if labels.is_floating_point():
            return labels.numel() // labels.shape[1]
        return (labels != IGNORED).sum()

    return count


def number_of_items(batch: Any) -> int:
    """Return the length of a batch along the first axis: what a mean loss without a count is a mean over."""
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim)


class ScheduledCollection:
    """Collects the two young generations, what recent steps left behind, every few steps.

    Args:
        every_steps: 0 for never.
    """

    def __init__(self, every_steps: int) -> None:
        self._every, self._steps = every_steps, 0

    def after_step(self) -> None:
        """A step of training is over."""
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            gc.collect(1)
