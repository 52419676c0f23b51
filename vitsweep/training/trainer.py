"""Trainer: a parallelized model with its optimizer, and one optimizer step."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from vitsweep.model.initialize import WRAPPERS, Draws
from vitsweep.model.module_look import inputs_of
from vitsweep.model.precision import autocast
from vitsweep.objectives.base import Batch, OpenObjective, Pair, Step, as_entries, at_least_float32
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import PrecisionPlan
from vitsweep.training.regularize import StochasticDepth
from vitsweep.training.trained_parameters import TrainedParameters
from vitsweep.training.update import LocalShards, LossScaler, MasterWeights, clip_gradients
from vitsweep.world import World

if TYPE_CHECKING:
    from vitsweep.techniques.averaging.ema import MovingAverage
    from vitsweep.techniques.pipeline_parallel.runner import PipelineRunner

MicroBatch = tuple[Tensor, Tensor] | Batch
"""Images (B, C, H, W) and labels (B,) or shares of classes (B, classes), or a mapping of tensors."""


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
        objective: prepares micro-batches, and makes losses of what the model returns.
        depth: leaves out branches for some images, where the recipe asks for it.
        average: of the weights, where `averaging` asks for it, or the objective has a teacher.
        trained: what is watched of the parameters of a user's module, whose steps may differ.
        steps_taken: optimizer steps so far; whoever resumes a training sets it.
        non_finite: whether any loss so far was inf or NaN; on the device, so that no step waits.
        total_steps: of the training; None where steps are only measured.
        before_update: called when gradients are averaged, unscaled and clipped.
        names: name without those of wrappers (`module`) -> name in the model as it was given.
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
    objective: OpenObjective
    depth: StochasticDepth | None
    average: "MovingAverage | None"
    trained: TrainedParameters | None
    names: Mapping[str, str]
    steps_taken: int = 0
    before_update: Callable[[], object] | None = None
    total_steps: int | None = None
    is_averaged: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._collection = ScheduledCollection(self.cell.runtime.collect_every_steps)

    def step(self, batches: Iterator[MicroBatch], marks: PhaseMarks | None = None) -> Tensor:
        """Train on one optimizer step's micro-batches.

        Returns:
            The mean loss over this rank's images, detached, still on the device. Where the objective counts
            it is this replica's share, whose mean over the replicas is the loss of the step.
        """
        marks = marks or _NoMarks()
        if self.trained:
            if self.cell.sharding.shards_parameters:
                self.reshard()  # what an evaluation gathered may have been frozen since
            self.trained.begin_step()
        if self.depth:
            self.depth.draw(self.steps_taken)
        try:
            with self.own_random_numbers():
                total = self.gradients(batches, marks)
            if self.trained:
                self.trained.require_gradients()
        except BaseException:  # a loop that goes on must not add to half of a step's gradients
            self.drop_gradients()
            raise
        self.update()
        self.non_finite |= ~torch.isfinite(total)
        marks.end("optimizer")
        self._collection.after_step()
        return total

    def gradients(
        self,
        batches: Iterator[MicroBatch],
        marks: PhaseMarks | None = None,
        micro_batches: int | None = None,
    ) -> Tensor:
        """Run both passes of a step's micro-batches, or of so many; return the mean loss as `step` does."""
        marks = marks or _NoMarks()
        micro_batches = micro_batches or self.cell.batch.accumulation_steps
        self.cell.compilation.begin_step()
        total = torch.zeros((), device=self.world.device, dtype=torch.float64)
        self.draws.begin(self.steps_taken)
        divisors: list[Any] = [micro_batches] * micro_batches
        if self.objective.reduction != "mean":  # known before the first backward pass
            taken = [as_entries(batch) for batch in islice(batches, micro_batches)]
            divisors = self.objective.divisors(taken, self.world)
            batches = iter(taken)
        for index, divisor in enumerate(divisors):
            batch = as_entries(next(batches))
            if self.depth:
                self.depth.select(index)
            marks.end("data")
            with self._sync(index == micro_batches - 1):
                total += self._add_gradients(batch, index, divisor, marks)
            marks.end("backward")
        self.cell.sequence_parallel.complete_gradients(self.model, self.world)
        self.cell.sharding.complete_gradients(self.model)
        marks.end("backward")
        return total

    def at(self, micro_batch: int = 0) -> Step:
        """Return the place of a micro-batch of this replica's, from 0, in the step that comes next."""
        return Step.of(self.cell, self.world, self.steps_taken, self.total_steps, micro_batch)

    def loss(self, batch: MicroBatch, step: Step | None = None) -> Tensor:
        """Return the loss of a prepared micro-batch, as the objective reduces it."""
        with self._autocast():
            outputs = self._outputs(as_entries(batch))
        return self.criterion(outputs, batch, step or self.at())

    def criterion(self, outputs: Any, batch: MicroBatch, step: Step) -> Tensor:
        """Return the loss of what the model returned, as the objective reduces it, in float32 or wider."""
        wide = tree_map_only(Tensor, at_least_float32, outputs)
        return self.objective.loss(wide, as_entries(batch), step)

    def _outputs(self, batch: Batch) -> Any:
        """Call the model with the images of a pair, or with those entries that its `forward` names."""
        if isinstance(batch, Pair):
            return self.model(self.cast(batch["image"]))
        inputs = inputs_of(unwrapped(self.model), batch)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                inputs[name] = self.cast(value)
        return self.model(**inputs)

    def predict(self, batch: Any) -> Any:
        """Return outputs of a prepared batch without gradients; only its inputs are read."""
        batch = as_entries(batch)
        if self.pipeline:
            return self.pipeline.predict(self.cast(batch["image"]))
        with torch.no_grad(), self._autocast():
            return self._outputs(batch)

    def _add_gradients(
        self, batch: Batch, micro_batch: int, divisor: Any, marks: PhaseMarks
    ) -> Tensor:
        """Run forward and backward; return this micro-batch's part of the mean loss."""
        scale = self.scaler.scale if self.scaler else lambda loss: loss
        at = self.at(micro_batch)
        batch = self.objective.prepare(batch, at)
        if self.objective.momentum:
            with self.averaged_weights():
                taught = self.predict(self.objective.of_teacher(batch))
            batch = {**batch, "teacher": tree_map_only(Tensor, at_least_float32, taught)}
        if self.pipeline:
            images, labels = batch.values()
            sums_by = divisor if self.objective.reduction == "sum" else None
            return self.pipeline.run(self.cast(images), labels, scale, marks.end, sums_by)
        loss = self.loss(batch, at) / divisor
        marks.end("forward")
        scale(loss).backward()
        return loss.detach()

    def update(self) -> None:
        """Unscale, clip, let the optimizer step, average the weights, and forget the gradients."""
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
            self.average.update(self.steps_taken, self.total_steps)
        self._drop_gradients()
        self.steps_taken += 1

    def drop_gradients(self) -> None:
        """Forget gradients that the optimizer is not given."""
        self.cell.sharding.drop_gradients(self.model)  # before the optimizer's shards have them
        self._drop_gradients()

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
        """Free what FSDP left gathered: a forward pass without a backward leaves its root so.

        What was frozen meanwhile stays frozen.
        """
        needs = {name: p.requires_grad for name, p in self.model.named_parameters()}
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(needs[name])

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

    def own_random_numbers(self) -> AbstractContextManager[None]:
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
