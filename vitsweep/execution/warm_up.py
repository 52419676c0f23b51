"""A run that only warms a machine up: its measurements are discarded."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vitsweep.execution.rank_processes import StartRanks
from vitsweep.execution.run_request import RunRequest
from vitsweep.execution.supervisor import append_attempt_event, start_local_ranks, supervise
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.measurement import MIN_BLOCKS


def needs_warm_up(cells: Sequence[CellSpec]) -> bool:
    """Return whether the machine is warmed up before a block of these cells.

    The first run of a machine finds cold caches and a clock at rest. Where the block compares cells
    by intervals, that would slow whichever cell comes first. Not needed for a block of one cell or
    for fewer blocks than an interval needs; trainings get none, because none of their runs is short.
    """
    has_intervals = any(cell.measurement.blocks >= MIN_BLOCKS for cell in cells[:1])
    is_training = any(cell.task.epochs for cell in cells)
    return len(cells) > 1 and has_intervals and not is_training


def warm_up(
    request: RunRequest,
    cell: CellSpec,
    scratch: Path,
    start: StartRanks = start_local_ranks,
    on_wait: Callable[[], None] = lambda: None,
) -> RunRecord:
    """Do a run and discard its record; the cell's `attempts.jsonl` gets a line with the event `warm_up`.

    Args:
        request: the run.
        cell: the frozen cell.
        scratch: folder for what the run writes, on all nodes the same; it is removed before and after.
        start: starts the ranks.
        on_wait: called while they run; may raise RunEnding.

    Returns:
        The record, which is not on disk any more.

    Raises:
        OSError: nothing can be written (a full disk).
        RunEnding: from `on_wait`.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    discarded = Store(scratch.absolute())
    try:
        discarded.freeze(request.cell_id, Store(request.sweep_folder).frozen(request.cell_id))
        record = supervise(replace(request, sweep_folder=discarded.root), cell, start, on_wait)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    append_attempt_event(request, "warm_up", status=str(record.status))
    return record
