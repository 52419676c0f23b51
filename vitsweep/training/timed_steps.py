"""Training steps that are timed: undisturbed ones, and ones with a clock between the phases."""

from collections.abc import Iterator

import torch

from vitsweep.measure.clocks import PhaseClock, StepClock
from vitsweep.spec.data import Batches
from vitsweep.training.trainer import MicroBatch, Trainer


def endless(batches: Batches, from_epoch: int = 0) -> Iterator[MicroBatch]:
    """Yield micro-batches, epoch after epoch."""
    epoch = from_epoch
    while True:
        yield from batches.train(epoch)
        epoch += 1


def timed_steps(
    trainer: Trainer, stream: Iterator[MicroBatch], steps: int
) -> tuple[list[float], list[torch.Tensor]]:
    """Train for some steps; return each step's time in milliseconds and its loss on the device.

    Nothing but the step lies between two marks, and no loss is read before the last step is over.
    """
    clock = StepClock(trainer.world.device)
    losses = []
    clock.mark()
    for _ in range(steps):
        losses.append(trainer.step(stream))
        clock.mark()
    return clock.times_ms(), losses


def instrumented_steps(
    trainer: Trainer, stream: Iterator[MicroBatch], steps: int
) -> dict[str, float]:
    """Train for some steps with a wait at every border; return phase -> median milliseconds."""
    clock = PhaseClock(trainer.world.device)
    for _ in range(steps):
        clock.begin_step()
        trainer.step(stream, clock)
    return clock.medians_ms()
