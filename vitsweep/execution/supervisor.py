"""The supervisor beside the ranks: starts them, sees every death, and writes how the run ended."""

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vitsweep.execution.outcome import drop_empty_logs, judge, publish
from vitsweep.execution.rank_processes import (
    SAVED,
    LocalRanks,
    Ranks,
    Start,
    context_for,
    wait_for_all,
)
from vitsweep.execution.run_request import RunRequest
from vitsweep.execution.worker import rank_main
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import append_line
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.saved import FOLDER, TRAINED, read_trained

GRACE_SECONDS = 2.0
"""After the first rank has failed, the others get this long to fail by themselves and say why."""
GOES_ON = (Status.killed, Status.preempted, Status.timed_out)
"""What another attempt may go on from."""


class RunEnding(Exception):
    """A run must end before it is done; raised while its ranks are waited for.

    Attributes:
        seconds_to_save: how long a training has to save itself; 0 where nobody wants it.
        saved_step: steps after which it has, set by the supervisor; None where it has not.
    """

    def __init__(self, reason: str, seconds_to_save: float) -> None:
        super().__init__(reason)
        self.seconds_to_save = seconds_to_save
        self.saved_step: int | None = None


def start_here(request: RunRequest, cell: CellSpec) -> Ranks:
    """Start all ranks of a cell on this machine."""
    everyone = range(cell.resources.world_size)
    return LocalRanks(context_for(cell), rank_main, (request,), everyone, request.folder)


def supervise(
    request: RunRequest,
    cell: CellSpec,
    start: Start = start_here,
    on_wait: Callable[[], None] = lambda: None,
) -> RunRecord:
    """Run all ranks of a cell and return the record, which is on disk by then.

    Args:
        request: the run.
        cell: as frozen.
        start: starts the ranks, here or on the nodes of an allocation.
        on_wait: called again and again while they run; may raise RunEnding.

    Raises:
        OSError: the record cannot be written (a full disk).
        RunEnding: from `on_wait`; the ranks are gone by then, a training has saved itself if there
            was time, and nothing is recorded unless all ranks were just done.
    """
    place = {"block": request.block, "position": request.position, "name": request.name}
    commit = request.environment.get("git_commit")
    note(request, "start", ranks=cell.resources.world_size, git_commit=commit, **place)
    ranks = start(request, cell)
    in_time, saved_step = False, None
    try:
        in_time = wait_for_all(ranks, cell.measurement.timeout_min * 60, GRACE_SECONDS, on_wait)
    except RunEnding as ending:
        if cell.task.epochs and ending.seconds_to_save > 0:
            saved_step = ending.saved_step = _interrupt(ranks, request, ending.seconds_to_save)
            if all(end.exit_code == 0 for end in ranks.ends()):  # it was done before it was told
                publish(request, cell, None)
        raise
    finally:
        ends = ranks.ends()  # before the rest is ended here: that is nobody's fault
        ranks.kill()
        codes = [end.exit_code for end in ranks.ends()]
        note(request, "end", exit_codes=codes, in_time=in_time, saved_step=saved_step)
    record = publish(request, cell, judge(ends, in_time, cell.measurement.timeout_min))
    if record.status not in GOES_ON:
        _drop_checkpoints((request.folder, *request.earlier))
    if record.status == Status.measured:
        drop_empty_logs(request)
    return record


def _interrupt(ranks: Ranks, request: RunRequest, seconds: float) -> int | None:
    """Let a training save itself; return after how many steps, or None where it has not."""
    ranks.interrupt()
    wait_for_all(ranks, seconds, GRACE_SECONDS)
    folder = request.folder / FOLDER
    if any(end.exit_code != SAVED for end in ranks.ends()) or not (folder / TRAINED).exists():
        return None
    _drop_checkpoints(request.earlier)
    return read_trained(folder).step


def _drop_checkpoints(attempts: Iterable[Path]) -> None:
    """Remove what attempts of a run saved, once nothing goes on from it."""
    for attempt in attempts:
        shutil.rmtree(attempt / FOLDER, ignore_errors=True)


def note(request: RunRequest, event: str, **facts: Any) -> None:
    """Write a line into the life of the cell's attempts."""
    entry = {
        "event": event,
        "run_id": request.run_id,
        "attempt": request.attempt,
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "job": request.environment.get("slurm_job_id"),
        "time": time.time(),
    }
    append_line(request.folder.parent.parent / "attempts.jsonl", entry | facts)
