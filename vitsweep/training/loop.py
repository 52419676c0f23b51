"""Steps to be timed, and epochs towards an accuracy."""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from vitsweep.measure.phases import PhaseClock
from vitsweep.measure.step_clock import StepClock
from vitsweep.spec.technique import Batches
from vitsweep.training.checkpoint_manager import CheckpointManager
from vitsweep.training.evaluate import accuracy_top1
from vitsweep.training.schedule import set_learning_rate
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


def train_epochs(
    trainer: Trainer, batches: Batches, checkpoints: CheckpointManager | None = None
) -> dict[str, float]:
    """Train for `task.epochs`; return the accuracy on held-out images and the seconds it took.

    With a checkpoints it goes on where an earlier attempt was interrupted, and can be interrupted.

    Raises:
        Interrupted: the ranks were told to stop; what is done by now is saved.
    """
    cell = trainer.cell
    per_epoch = batches.num_train // cell.images_per_step
    total = cell.task.epochs * per_epoch
    done, earlier_seconds = checkpoints.resume(trainer) if checkpoints else (0, 0.0)
    begin = time.perf_counter() - earlier_seconds

    def stop_if_told(*, at_once: bool = False) -> None:
        if checkpoints and checkpoints.told_to_stop(at_once=at_once):
            checkpoints.save_and_stop(trainer, done, time.perf_counter() - begin)

    while done < total:
        epoch, step = divmod(done, per_epoch)
        stream = batches.train(epoch, step * cell.batch.accumulation_steps)
        for _ in range(step, per_epoch):
            stop_if_told()
            set_learning_rate(trainer.optimizer, cell, done, total)
            trainer.step(stream)
            done += 1
    stop_if_told(at_once=True)
    if dist.is_initialized():
        dist.barrier()
    seconds = time.perf_counter() - begin
    return {"accuracy_top1": accuracy_top1(trainer, batches), "train_seconds": seconds}
