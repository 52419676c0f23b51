"""How long one run of a cell takes, given its step time: set-up, timed steps, training (no torch)."""

from vitsweep.spec.cell_spec import CellSpec

SETUP_SECONDS = 15.0
"""Start of the processes, imports, rendezvous, model and proof of one run on several nodes (assumed)."""
SETUP_INTERVAL_SECONDS = (5.0, 45.0)
"""80 % of runs are meant to lie between: from a small model on one node to many nodes that import from a
network file system (assumed)."""
CPU_SETUP_SECONDS = (1.5, 0.5, 10.0)
"""The same and its interval on one node without a GPU: 0.65 to 0.9 s a run, with the proof 2 to 5 s, on two
cores of a Xeon; the processes are forked from one that has imported all."""
GPU_SETUP_SECONDS = (2.7, 2.0, 15.0)
"""The same on one node with GPUs, mean of five runs on one H200: 0.8 s, 1.4 s between runs, and in the first
2 to 3 s of proof. Compiled cells take 9 to 20 s."""
INSTRUMENTED_STEPS = 4
"""Steps after the timed ones that measure memory and communication."""
FORWARD_SHARE = 1 / 3
"""Time of an evaluated image over that of a trained one: of the three products of each layer, two belong
to the backward pass."""


def run_seconds(
    cell: CellSpec, step_time_ms: float, setup_seconds: float = SETUP_SECONDS
) -> float | None:
    """Return the duration of one run; None for a training on an unknown number of images.

    Args:
        cell: the cell.
        step_time_ms: of a timed step.
        setup_seconds: from the start of the processes to the first step.
    """
    m, step = cell.measurement, step_time_ms / 1e3
    warm_up = max(m.warmup_steps * step, m.warmup_min_seconds)
    window = max(m.least_steps * step, m.min_seconds)
    if m.max_seconds < max(warm_up, window):
        warm_up = min(warm_up, max(m.max_seconds, step))
        window = min(window, max(m.max_seconds, 2 * step))
    after = (m.phase_steps + INSTRUMENTED_STEPS) * step
    training = training_seconds(cell, step_time_ms)
    return None if training is None else setup_seconds + warm_up + window + after + training


def training_seconds(cell: CellSpec, step_time_ms: float) -> float | None:
    """Return the duration of `task.epochs` with their evaluations, from newly initialised weights.

    It ends after its last epoch whether or not `task.target_accuracy` is reached before. Writing checkpoints
    is left out.

    Returns:
        0 where the cell does not train; None where the number of images is unknown.
    """
    if not cell.task.epochs:
        return 0.0
    sizes = cell.data.split_sizes()
    if sizes is None:
        return None
    train, test = sizes
    steps = cell.task.epochs * (train // cell.images_per_step)
    evaluated = _evaluations(cell) * test / cell.images_per_step * FORWARD_SHARE
    return (steps * _size_share(cell) + evaluated) * step_time_ms / 1e3


def _evaluations(cell: CellSpec) -> int:
    """Number of evaluations of a training; the last epoch is always evaluated."""
    epochs, every = cell.task.epochs, cell.task.evaluate_every_epochs
    return -(-epochs // every) if every else 1


def _size_share(cell: CellSpec) -> float:
    """Work of an epoch over that of one of full size, mean over the epochs."""
    if not cell.schedule.changes_sizes:
        return 1.0
    from vitsweep.training.epochs import flops_share  # loads torch

    return flops_share(cell)
