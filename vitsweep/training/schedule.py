"""Learning rate of `task=train`: linear warm-up, then half a cosine to zero."""

import math

from torch.optim import Optimizer

from vitsweep.spec.cell_spec import CellSpec


def learning_rate(cell: CellSpec, step: int, total_steps: int) -> float:
    """Return the learning rate of one step.

    Args:
        cell: gives the peak rate and the warm-up.
        step: from 0.
        total_steps: steps of the whole training.
    """
    warm = cell.task.warmup_epochs / max(cell.task.epochs, 1) * total_steps
    peak = cell.optimizer.learning_rate
    if step < warm:
        return peak * (step + 1) / (warm + 1)
    progress = (step - warm) / max(1.0, total_steps - warm)
    return peak * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Optimizer, cell: CellSpec, step: int, total_steps: int) -> None:
    """Set the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(cell, step, total_steps)
