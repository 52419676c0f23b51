"""Training for `task.epochs` to an accuracy: learning rate, resumable loop, evaluation."""

import math
import time

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.data import Batches
from vitsweep.training.checkpoint_manager import CheckpointManager
from vitsweep.training.trainer import Trainer


def train_epochs(
    trainer: Trainer, batches: Batches, checkpoints: CheckpointManager | None = None
) -> dict[str, float]:
    """Train for `task.epochs`, then evaluate on the held-out images.

    Args:
        trainer: with newly initialised weights.
        batches: training and test batches.
        checkpoints: with it, training resumes from the checkpoint of an earlier attempt, and can be
            interrupted between two steps.

    Returns:
        `accuracy_top1` (0 to 1) and `train_seconds` (all attempts together, without evaluation).

    Raises:
        TrainingInterrupted: a stop was requested; a checkpoint of all steps so far is on disk.
    """
    cell = trainer.cell
    per_epoch = batches.num_train // cell.images_per_step
    total = cell.task.epochs * per_epoch
    done, earlier_seconds = checkpoints.resume(trainer) if checkpoints else (0, 0.0)
    trainer.steps_taken = done
    begin = time.perf_counter() - earlier_seconds

    def stop_if_requested(*, at_once: bool = False) -> None:
        if checkpoints and checkpoints.stop_requested(at_once=at_once):
            checkpoints.save_and_stop(trainer, done, time.perf_counter() - begin)

    while done < total:
        epoch, step = divmod(done, per_epoch)
        stream = batches.train(epoch, step * cell.batch.accumulation_steps)
        for _ in range(step, per_epoch):
            stop_if_requested()
            set_learning_rate(trainer.optimizer, cell, done, total)
            trainer.step(stream)
            done += 1
    stop_if_requested(at_once=True)
    if dist.is_initialized():
        dist.barrier()
    seconds = time.perf_counter() - begin
    return {"accuracy_top1": accuracy_top1(trainer, batches), "train_seconds": seconds}


def learning_rate(cell: CellSpec, step: int, total_steps: int) -> float:
    """Return the learning rate of one step: linear warm-up, then half a cosine to zero.

    Args:
        cell: its `optimizer.learning_rate` is the peak; `task.warmup_epochs` is the warm-up.
        step: optimizer step, from 0.
        total_steps: optimizer steps of the whole training.
    """
    warm = cell.task.warmup_epochs / max(cell.task.epochs, 1) * total_steps
    peak = cell.optimizer.learning_rate
    if step < warm:
        return peak * (step + 1) / (warm + 1)
    progress = (step - warm) / max(1.0, total_steps - warm)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Optimizer, cell: CellSpec, step: int, total_steps: int) -> None:
    """Set the learning rate of every parameter group for one step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(cell, step, total_steps)


def accuracy_top1(trainer: Trainer, batches: Batches) -> float:
    """Return the share of held-out images whose largest logit is their label.

    Each image counts once over all ranks. Every replica has the same number of test batches, since
    a forward pass of a sharded model gathers parameters from all ranks.
    """
    correct_and_total = torch.zeros(2, device=trainer.world.device, dtype=torch.float64)
    trainer.model.eval()
    with trainer.averaged_weights():
        for images, labels in batches.test():
            correct_and_total[0] += (trainer.predict(images).argmax(-1) == labels).sum()
            correct_and_total[1] += len(labels)
    trainer.model.train()
    if dist.is_initialized():
        dist.all_reduce(correct_and_total)  # ranks that share an image count it equally often
    return float(correct_and_total[0] / correct_and_total[1])
