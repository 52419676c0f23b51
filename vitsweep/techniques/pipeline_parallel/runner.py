"""Running a step through the stages by torch.distributed.pipelining (needs torch)."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from vitsweep.collectives.primitives import from_first, sent_as
from vitsweep.model.block import become
from vitsweep.world import World

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "one_f_one_b": Schedule1F1B}
CHUNKS = {"forward_one_chunk": "forward", "backward_one_chunk": "backward"}
"""What schedules call on a stage for each micro-batch, and which phase that is."""


@dataclass
class PipelineRunner:
    """Forward and backward of one batch over all stages.

    Attributes:
        stage: this rank's, as the sharding wrapped it.
        criterion: (outputs, labels) -> mean loss of a micro-batch, or its sum.
        schedule: a key of `SCHEDULES`.
        microbatches: parts of a batch.
        world: ranks.
    """

    stage: nn.Module
    criterion: Callable[[Tensor, Tensor], Tensor]
    schedule: str
    microbatches: int
    world: World
    _scheduled: Any = None
    _divisor: Any = None
    _scale: Callable[[Tensor], Tensor] = field(default=lambda loss: loss)
    _mark: Callable[[str], None] = field(default=lambda phase: None)

    def run(
        self,
        images: Tensor,
        labels: Tensor,
        scale: Callable[[Tensor], Tensor],
        mark: Callable[[str], None] = lambda phase: None,
        divisor: Tensor | None = None,
    ) -> Tensor:
        """Compute gradients of the mean loss times `scale`; return the mean loss, on every rank.

        Args:
            images: of this replica.
            labels: of these images.
            scale: of the loss.
            mark: called after every chunk of a stage which phase it was (`forward`, `backward`), and
                before it that the stage has waited until then (`bubble`).
            divisor: of the sums of all micro-batches; None for means, of which the mean is taken.
        """
        self._scale, self._mark = scale, mark
        self._divisor = self.microbatches if divisor is None else divisor
        self._scheduled = self._scheduled or self._build(images)
        losses: list[Tensor] = []
        inputs = (images,) if self._rank == 0 else ()
        has_loss = self._rank == self._ranks - 1
        target = {"target": labels, "losses": losses} if has_loss else {}
        self._scheduled.step(*inputs, **target)
        total = torch.zeros((), device=images.device, dtype=torch.float64)
        for loss in losses:
            total += loss.detach().double()
        one = torch.ones((), device=self.world.device, dtype=torch.float32)
        mean = total / self._scale(one).double()
        with sent_as("activation"):
            dist.all_reduce(mean, group=self._group)  # only the last rank's is not zero
        mark("bubble")  # the last messages on their way, and the loss from the last stage
        return mean

    def predict(self, images: Tensor) -> Tensor:
        """Return outputs without gradients, on every rank: one stage after the other."""
        return self._between_stages(images)[-1]

    @torch.no_grad()
    def _between_stages(self, images: Tensor) -> list[Tensor]:
        """Return what enters each stage, and the outputs, on every rank."""
        found, group = [images], self._group
        for owner in range(self._ranks):
            x = found[-1]
            if owner == self._rank:
                x = self.stage(x).contiguous()
            source = dist.get_global_rank(group, owner)
            own = [list(x.shape), str(x.dtype).removeprefix("torch.")]
            shape, dtype = from_first(own, group, owner)
            if owner != self._rank:
                x = torch.empty(shape, dtype=getattr(torch, dtype), device=images.device)
            dist.broadcast(x, source, group=group)
            found.append(x)
        return found

    @property
    def _group(self) -> dist.ProcessGroup:
        return self.world.axis("pipeline").get_group()

    @property
    def _rank(self) -> int:
        return self._group.rank()

    @property
    def _ranks(self) -> int:
        return self._group.size()

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        loss = self._scale(self.criterion(outputs, labels) / self._divisor)
        self._mark("forward")
        return loss

    def _build(self, images: Tensor) -> Any:
        # Shapes are found by a pass of our own: torch's would run a backward pass as well, which
        # DDP takes for a step.
        between = self._between_stages(images.chunk(self.microbatches)[0])
        rank = self._rank
        stage = PipelineStage(
            self.stage,
            rank,
            self._ranks,
            self.world.device,
            input_args=_example(between[rank], needs_gradient=rank > 0),
            output_args=_example(between[rank + 1], needs_gradient=True),
            group=self._group,
        )
        # Schedules take both passes in turns; only the stage knows which of them runs.
        for method, phase in CHUNKS.items():
            setattr(stage, method, self._marked(getattr(stage, method), phase))
        # The mean over micro-batches is part of the loss: gradients are not scaled again.
        kind = SCHEDULES[self.schedule]
        return kind(stage, self.microbatches, loss_fn=self._loss, scale_grads=False)

    def _marked(self, chunk: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            self._mark("bubble")
            result = chunk(*args, **kwargs)
            self._mark(phase)
            return result

        return told


def _example(tensor: Tensor, *, needs_gradient: bool) -> Tensor:
    return torch.empty_like(tensor, requires_grad=needs_gradient)


# Cutting a finished model into stages (needs torch).


def cut(
    model: nn.Module,
    stage: int,
    stages: int,
    forward_context: Callable[[], AbstractContextManager[Any]],
) -> nn.Module:
    """Return a stage of a model, by its number.

    Blocks are dealt out contiguously and evenly, the first stages having one more where they do not
    divide. Parameters keep their names: block 3 is `blocks.3` in whichever stage it is.
    """
    whole: Any = model.blocks
    first, end = (number * len(whole) // stages for number in (stage, stage + 1))
    part, blocks = copy.copy(model), copy.copy(whole)
    part._modules = dict(model._modules)
    part.blocks = blocks
    blocks._modules = {str(i): whole[i] for i in range(first, end)}
    if stage > 0:
        part.embedding = None  # type: ignore[assignment]
        blocks._forward_pre_hooks = OrderedDict()  # tokens come as the first stage dealt them out
    if stage < stages - 1:
        part.norm = part.head = None  # type: ignore[assignment]
    part.forward_context = forward_context  # type: ignore[assignment]
    become(part, StagePart)
    return part


class StagePart:
    """What a stage does instead of the whole model's forward; mixed into the model's class."""

    blocks: Any
    embedding: nn.Module | None
    head: nn.Module | None

    forward_context: Callable[[], AbstractContextManager[Any]]

    def forward(self, x: Tensor) -> Tensor:
        """Map images, or the tokens of the previous stage, to tokens, or in the last stage to outputs."""
        # Inside the stage: the schedule runs forward and backward, and the latter has no autocast.
        with self.forward_context():
            return self._part(x)

    def _part(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        x = self.blocks(x)
        if self.head is not None:
            return self.read_out(x)  # type: ignore[attr-defined]
        return x.contiguous()  # what is sent must be
