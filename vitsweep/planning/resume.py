"""Trainings that were interrupted on this machine and saved: the same command continues them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vitsweep.execution.attempts import Attempt, attempts
from vitsweep.planning.blocks import Block
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store


def interrupted_trainings(
    store: Store, code_hashes: Mapping[str, str], runs: Iterable[RunRecord]
) -> list[Attempt]:
    """Return the interrupted runs of some cells, oldest first, each by its latest attempt.

    Its `saved_step` is that of the latest attempt that saved the training.

    Jobs of a cluster continue their own runs. A run that was begun by other code is begun anew: half
    of it would be measured with each.

    Args:
        store: of the sweep.
        code_hashes: cell id -> hash of its code as it is now, for the cells to look at.
        runs: records of the store.
    """
    names = [run.run_id for run in runs]
    return [
        training
        for cell_id, code_hash in code_hashes.items()
        for training in _of_cell(store, cell_id)
        if training.code_hash == code_hash
        and not any(name.startswith(training.run.name) for name in names)
    ]


def _of_cell(store: Store, cell_id: str) -> list[Attempt]:
    """Return the latest attempt at each run that was saved, with the step at which it was saved last."""
    latest: dict[str, Attempt] = {}
    for attempt in attempts(store, cell_id):
        if attempt.job is None:
            if attempt.saved_step is None and (before := latest.get(attempt.run.name)):
                attempt = replace(attempt, saved_step=before.saved_step)
            latest[attempt.run.name] = attempt
    return [attempt for attempt in latest.values() if attempt.saved_step is not None]


def blocks_to_complete(
    interrupted: Sequence[Attempt],
    plan: SweepPlan,
    missing: Mapping[str, int],
    runs: Iterable[RunRecord],
    cells_per_block: int,
) -> list[Block]:
    """Return the blocks of interrupted runs.

    What such a run measures belongs to its block, so the block gets the cells that the run is
    compared with as well, as far as they lack blocks and are not in it yet.

    Args:
        interrupted: the runs to continue; they come first in their blocks.
        plan: the cells.
        missing: cell id -> number of blocks it lacks.
        runs: records of the store.
        cells_per_block: cells of one block, baselines not counted.
    """
    present, left, found = {(run.block, run.cell_id) for run in runs}, dict(missing), []
    for training in interrupted:
        entry = plan.entries[training.run.cell_id]
        members = {entry.cell_id: entry}
        for other in _compared_with(entry, plan, left, cells_per_block):
            if (training.run.block, other.cell_id) not in present:
                members.setdefault(other.cell_id, other)
        left |= {cell_id: left.get(cell_id, 0) - 1 for cell_id in members}
        found.append(Block(training.run.block, tuple(members.values())))
    return found


def _compared_with(
    entry: PlannedCell, plan: SweepPlan, left: Mapping[str, int], size: int
) -> list[PlannedCell]:
    """Return the baseline of a cell, and the cells with the same one that lack blocks."""
    if entry.baseline_id is None:
        return []
    same = [e for e in plan.runnable if e.baseline_id == entry.baseline_id]
    lacking = [e for e in same if left.get(e.cell_id, 0) > 0]
    return [plan.entries[entry.baseline_id], *lacking[:size]]
