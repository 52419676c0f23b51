"""One rank of one run: reads a frozen cell, runs it, and reports how it ended."""

import multiprocessing
import secrets
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitsweep.data.damaged_images import list_damaged
from vitsweep.errors import VitsweepError, storage_error
from vitsweep.execution.outcome import (
    EXIT_SAVED,
    EXIT_STORAGE,
    NO_INSTRUMENTS,
    RECORD_DRAFT,
    write_failure,
)
from vitsweep.execution.process import end_with_launcher, exit_now, joined_process_group, log_to
from vitsweep.execution.rank_processes import STOP_SIGNAL
from vitsweep.execution.run_request import RunRequest, read_cell
from vitsweep.files import write_atomically
from vitsweep.results.record import (
    RunRecord,
    Status,
    recorded_samples,
    time_to_begin,
    utc_now,
)
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import with_user_metrics
from vitsweep.spec.cell_spec import CellSpec, flatten
from vitsweep.spec.rules import lacking_here
from vitsweep.training.checkpoint_files import CHECKPOINT_FOLDER, TrainingInterrupted
from vitsweep.world import World

if TYPE_CHECKING:
    from vitsweep.measure.summarize import Summary
    from vitsweep.training.checkpoint_manager import CheckpointManager

_stop_requested = threading.Event()


def rank_main(request: RunRequest, rank: int, local_rank: int) -> None:
    """Run one rank in a process of its own; the exit code is 0 only if all its work is done.

    Rank 0 leaves the record of a timed run in the run's folder. The supervisor publishes it when the run
    has ended, also where a rank died under the instruments. A rank that raises leaves `failure-<rank>.json`.
    """
    end_with_launcher()
    signal.signal(STOP_SIGNAL, lambda *_: _stop_requested.set())
    multiprocessing.current_process().daemon = False  # a daemon could not start loader workers
    try:
        log_to(request.folder / f"rank{rank}.log")
        store = Store(request.sweep_folder, {request.cell_id: request.digest})
        cell = read_cell(store, request.cell_id, request.of_command)
        _set_up(cell, local_rank)
        with joined_process_group(cell, rank, local_rank, request.init_method) as world:
            draft = request.folder / RECORD_DRAFT
            record = _run(request, cell, world, _checkpoint_manager(request, cell, world), draft)
            if record is not None:
                write_atomically(draft, record.to_json())
            if world.size == 1:  # nobody waits for this rank to leave its process group
                exit_now(0)
    except TrainingInterrupted as interrupted:
        print(interrupted)
        exit_now(EXIT_SAVED)
    except BaseException as error:  # whatever it is, the supervisor must know why
        write_failure(request.folder, rank, error)
        exit_now(EXIT_STORAGE if storage_error(error) else 1)
    exit_now(0)


def run_rank_in_process(request: RunRequest, cell: CellSpec, rank: int, local_rank: int) -> None:
    """Run one rank in this very process, which torchrun or srun started; rank 0 publishes the record.

    There is no supervisor: an exception ends the process, and the launcher of the ranks sees it.
    """
    from vitsweep.collectives.primitives import from_first

    _set_up(cell, local_rank)
    cell = replace(cell, measurement=replace(cell.measurement, start="spawned"))
    with joined_process_group(cell, rank, local_rank, request.init_method) as world:
        name = from_first(f"in-place-{secrets.token_hex(4)}")
        request = replace(request, run_id=name, block=name)
        try:
            record = _run(request, cell, world, None)
        finally:
            with suppress(OSError):  # another rank lists at the same time
                list_damaged(request.sweep_folder, request.folder)
        if record is not None:
            Store(request.sweep_folder).publish(record)


def _set_up(cell: CellSpec, local_rank: int) -> None:
    """Prepare the process of a rank.

    Raises:
        VitsweepError: this node lacks what the cell needs.
    """
    for reason in lacking_here(cell):
        raise VitsweepError(reason)
    cell.runtime.set_up(cell, local_rank)


def _run(
    request: RunRequest,
    cell: CellSpec,
    world: World,
    checkpoints: "CheckpointManager | None",
    draft: Path | None = None,
) -> RunRecord | None:
    """Run the cell; return its record on rank 0, None on the others.

    Args:
        request: the run.
        cell: its cell.
        world: its ranks.
        checkpoints: of a training that is supervised.
        draft: file for what was timed, before instruments run that may fail; None where nobody reads it.
    """
    from vitsweep.cell import RunContext, run_cell

    store = Store(request.sweep_folder)
    asked_at = request.environment.get("started_at") or time_to_begin(store.runs(request.cell_id))
    started_at, begin = max(utc_now(), str(asked_at)), time.monotonic()

    def record_of(summary: "Summary", **more: str) -> RunRecord:
        times = {"started_at": started_at, "run_seconds": round(time.monotonic() - begin, 3)}
        return request.record(
            status=Status.measured,
            spec=flatten(cell),
            metrics=summary.metrics,
            validity=summary.validity,
            environment=summary.environment | dict(request.environment) | times | more,
            samples=summary.samples,
        )

    def keep(timed: "Summary") -> None:
        if draft and world.rank == 0:
            record = record_of(timed, **{NO_INSTRUMENTS: "The run ended after the timed steps."})
            write_atomically(draft, record.to_json())

    context = RunContext(
        proved=request.proved,
        proved_exactly=request.proved_exactly,
        folder=request.folder,
        checkpoints=checkpoints,
        keep=keep,
        instruments=request.instruments,
    )
    summary = run_cell(cell, world, context)
    if world.rank:
        return None
    lacking = {} if request.instruments else {NO_INSTRUMENTS: "Earlier runs of the cell have them."}
    record = with_user_metrics(record_of(summary, **lacking), request.metrics)
    return replace(record, samples=recorded_samples(record.samples))


def _checkpoint_manager(request: RunRequest, cell: CellSpec, world: World) -> "CheckpointManager":
    from vitsweep.training.checkpoint_manager import CheckpointManager, StopConsensus

    minutes = cell.task.checkpoint_minutes
    return CheckpointManager(
        folder=request.folder / CHECKPOINT_FOLDER,
        earlier=tuple(folder / CHECKPOINT_FOLDER for folder in request.earlier),
        stop=StopConsensus(_stop_requested, world.device),
        trainings=tuple(folder / CHECKPOINT_FOLDER for folder in request.trainings),
        resume_from=cell.task.resume_from,
        every_seconds=None if minutes is None else 60 * minutes,
    )
