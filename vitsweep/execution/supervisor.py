"""The supervisor of a run: starts its ranks, watches how they end, and publishes the record."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitsweep.execution.attempts import (
    append_end,
    append_start,
    append_warm_up,
    broken_off_trainings,
)
from vitsweep.execution.code_hash import Sources
from vitsweep.execution.outcome import failure_of, publish, remove_working_files
from vitsweep.execution.rank_processes import (
    LocalRanks,
    Ranks,
    StartRanks,
    context_for,
    wait_for_ranks,
)
from vitsweep.execution.run_request import RunRequest
from vitsweep.execution.worker import rank_main
from vitsweep.files import remove
from vitsweep.results.record import RunRecord, Status, utc_now
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.checkpoint_files import CHECKPOINT_FOLDER, read_info, whole_checkpoints

GRACE_SECONDS = 2.0
"""After the first rank has failed, the others get this long to fail and report by themselves."""
RESUMABLE = (Status.killed, Status.preempted, Status.timed_out)
"""A later attempt may resume from the checkpoint of a run that ended so."""


class RunEnding(Exception):
    """A run must end before it is done; raised by `on_wait` while its ranks run.

    Attributes:
        seconds_to_save: time for a training to save a checkpoint; 0 to save none.
        is_forced: tells while it saves whether the user no longer waits for it.
        saved_step: optimizer steps in the checkpoint, set by the supervisor; None if there is none.
    """

    def __init__(
        self, reason: str, seconds_to_save: float, is_forced: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(reason)
        self.seconds_to_save, self.is_forced = seconds_to_save, is_forced
        self.saved_step: int | None = None


def start_local_ranks(request: RunRequest, cell: CellSpec) -> Ranks:
    """Start all ranks of a cell on this machine."""
    ranks = range(cell.resources.world_size)
    environment = cell.runtime.environment()
    return LocalRanks(context_for(cell), rank_main, (request,), ranks, request.folder, environment)


def supervise(
    request: RunRequest,
    cell: CellSpec,
    start: StartRanks = start_local_ranks,
    on_wait: Callable[[], None] = lambda: None,
) -> RunRecord:
    """Run all ranks of a cell and publish the record.

    Args:
        request: the run.
        cell: as the command wants it; its `measurement` may differ from that of the frozen cell.
        start: starts the ranks, on this machine or on the nodes of an allocation.
        on_wait: called about five times a second while they run; may raise RunEnding.

    Returns:
        The record, which is on disk.

    Raises:
        OSError: the record cannot be written (a full disk).
        RunEnding: from `on_wait`. The ranks are gone then, a training has saved a checkpoint if
            there was time, and nothing is recorded unless all ranks had just finished.
    """
    request = _completed(request, cell)
    append_start(request, cell)
    ranks = start(request, cell)
    in_time, saved_step = False, None
    try:
        in_time = wait_for_ranks(ranks, cell.measurement.timeout_min * 60, GRACE_SECONDS, on_wait)
    except RunEnding as ending:
        if cell.task.epochs and ending.seconds_to_save > 0:
            saved_step = ending.saved_step = _interrupt(ranks, request, ending)
        ranks.kill()  # the reports of ranks that have ended meanwhile are read too
        if all(end.exit_code == 0 for end in ranks.ends()):
            publish(request, cell, None)
        raise
    finally:
        ends = ranks.ends()  # read before `kill` below ends the others
        ranks.kill()
        codes = [end.exit_code for end in ranks.ends()]
        append_end(request, codes, in_time, saved_step)
    finished = set(codes) == {0}  # even where the time was over before that was known
    failure = None if finished else failure_of(ends, in_time, cell.measurement.timeout_min)
    record = publish(request, cell, failure)
    if record.status not in RESUMABLE:
        _drop_checkpoints((request.folder, *request.earlier, *request.trainings))
    if record.status == Status.measured:
        remove_working_files(request)
    return record


def _completed(request: RunRequest, cell: CellSpec) -> RunRequest:
    """Add what belongs to the command and not to the frozen cell, and what every record says."""
    facts: dict[str, Any] = {"started_at": utc_now(), "code_hash": Sources().of(cell).hash}
    store, cell_id = Store(request.sweep_folder), request.cell_id
    trainings: tuple[Path, ...] = ()
    facts |= store.prediction(cell_id)
    if cell.task.epochs:
        trainings = broken_off_trainings(store, cell_id, facts["code_hash"])
    return replace(
        request,
        trainings=trainings,
        measurement=cell.measurement.of_command,
        environment=facts | request.environment,
    )


def _interrupt(ranks: Ranks, request: RunRequest, ending: RunEnding) -> int | None:
    """Let a training save a checkpoint; return its optimizer steps, or None if it has saved none.

    The info file alone decides. A rank may still fail while it leaves: gloo's last barrier breaks
    now and then where the other ranks have exited.
    """

    def leave_if_forced() -> None:
        if ending.is_forced():
            raise ending

    ranks.interrupt()
    with suppress(RunEnding):
        wait_for_ranks(ranks, ending.seconds_to_save, GRACE_SECONDS, leave_if_forced)
    whole = whole_checkpoints(request.folder / CHECKPOINT_FOLDER)
    if not whole:
        return None
    _drop_checkpoints((*request.earlier, *request.trainings))
    return read_info(whole[0]).step


def _drop_checkpoints(attempts: Iterable[Path]) -> None:
    """Remove the checkpoints of attempts, once nothing resumes from them."""
    for attempt in attempts:
        remove(attempt / CHECKPOINT_FOLDER)


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
    remove(scratch)
    discarded = Store(scratch.absolute()).create()
    try:
        discarded.freeze(request.cell_id, Store(request.sweep_folder).frozen(request.cell_id))
        record = supervise(replace(request, sweep_folder=discarded.root), cell, start, on_wait)
    finally:
        remove(scratch)
    append_warm_up(request, record.status)
    return record
