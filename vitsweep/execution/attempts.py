"""`attempts.jsonl` of a cell: a line for the start of each attempt at a run, and one for its end.

The supervisor of a run writes it, whatever becomes of the run. Its lines therefore tell which runs were
left unfinished by a command or a job that died, and which trainings can be continued.
"""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from vitsweep.execution.outcome import RECORD_DRAFT, RunFailure, publish
from vitsweep.execution.run_request import (
    UNFINISHED,
    Run,
    RunRequest,
    attempt_folder,
    read_cell,
    request_for,
)
from vitsweep.files import NAME, append_line, fits, make_durable
from vitsweep.job_environment import node_name, scheduler_job
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.checkpoint_files import CHECKPOINT_FOLDER, whole_checkpoints

FILE = "attempts.jsonl"
ALLOCATION = "allocation"
"""Launcher whose attempts whoever holds the lock of the sweep knows to be over, on any host."""
KILLED = "The command that ran it was killed."
MOST_PID = 2**22
"""Of Linux on 64 bits, proc_sys_kernel(5)."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a run: what its start says, and its end where there is one.

    Attributes:
        run: the run.
        number: of the attempt, from 1.
        run_id: name of its record.
        node: host that supervises it.
        job: Slurm's job, None on this machine.
        pid: process that supervises it; None where the line does not say.
        launcher: that supervises it.
        started_at: seconds since 1970.
        code_hash: of the code that began it, see `execution.code_hash`.
        exit_codes: of its ranks; None while it runs, and where its supervisor died.
        saved_step: optimizer steps after which its training was saved, or None.
    """

    run: Run
    number: int
    run_id: str
    node: str
    job: str | None
    pid: int | None
    launcher: str
    started_at: float
    code_hash: str | None
    exit_codes: tuple[int | None, ...] | None
    saved_step: int | None

    @property
    def has_ended(self) -> bool:
        """Whether its supervisor saw its end."""
        return self.exit_codes is not None

    @property
    def is_running(self) -> bool:
        """Whether the process that supervises it is alive on this machine; pids are used again."""
        if self.launcher == ALLOCATION and self.node != node_name():
            return False
        try:
            process = psutil.Process(self.pid)
            began_before = process.create_time() <= self.started_at
            return began_before and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("event", "run_id", "name", "block", "node"), (str,)),
    **dict.fromkeys(("attempt", "position"), (int,)),
    **dict.fromkeys(("pid", "saved_step"), (int, type(None))),
    "launcher": (str, type(None)),
    **{"time": (int, float), "exit_codes": (list,), "code_hash": (str, type(None))},
}


def _is_whole(event: dict[str, Any]) -> bool:
    needed = ("event", "run_id", *(("attempt",) if event.get("event") == "start" else ()))
    ids = event.get("run_id", ""), event.get("name", event.get("run_id", ""))
    return (
        fits(event, _KINDS, needed)
        and all(map(NAME.fullmatch, ids))
        and 0 < (event.get("pid") or 1) <= MOST_PID
        and all(type(code) in (int, type(None)) for code in event.get("exit_codes", ()))
    )


def attempts(store: Store, cell_id: str) -> list[Attempt]:
    """Return the attempts at runs of a cell, in the order in which they began."""
    events = [event for event in store.lines(cell_id, FILE) if _is_whole(event)]
    ends = {event["run_id"]: event for event in events if event["event"] == "end"}
    found = []
    for start in (event for event in events if event["event"] == "start"):
        run_id, end = start["run_id"], ends.get(start["run_id"])
        place = start.get("block", ""), start.get("position", 0)
        found.append(
            Attempt(
                run=Run(*place, cell_id, start.get("name", run_id)),
                number=start["attempt"],
                run_id=run_id,
                node=start.get("node", ""),
                job=start.get("job"),
                pid=start.get("pid"),
                launcher=start.get("launcher") or "local",
                started_at=start.get("time", 0.0),
                code_hash=start.get("code_hash"),
                exit_codes=None if end is None else tuple(end.get("exit_codes", ())),
                saved_step=None if end is None else end.get("saved_step"),
            )
        )
    return found


def append_event(request: RunRequest, event: str, **facts: Any) -> None:
    """Add a line to the attempts of a cell.

    Args:
        request: the attempt.
        event: `start`, `end`, or `warm_up` of a run that leaves no record.
        facts: besides which attempt it is, where and when.
    """
    entry = {
        "event": event,
        "run_id": request.run_id,
        "attempt": request.attempt,
        "node": node_name(),
        "job": request.environment.get("slurm_job_id"),
        "time": time.time(),
    }
    append_line(request.folder.parent.parent / FILE, entry | facts)


def append_start(request: RunRequest, cell: CellSpec) -> None:
    """Note that an attempt begins, by which process and with which code."""
    codes = {key: request.environment.get(key) for key in ("git_commit", "code_hash")}
    by = {"launcher": request.environment.get("launcher"), "scheduler_job": scheduler_job()}
    place = {"block": request.block, "position": request.position, "name": request.name}
    append_event(
        request, "start", ranks=cell.resources.world_size, pid=os.getpid(), **by, **codes, **place
    )
    if cell.task.epochs:  # by this line a later attempt finds its checkpoints
        make_durable(request.folder.parent.parent / FILE)


# What an attempt left whose supervisor died before it could write the record.


def _left_a_measurement(store: Store, cell_id: str, run_id: str, attempt: int) -> bool:
    """Return whether all ranks of an attempt ended well and left a record that was not published.

    So it is where the supervisor of the run was killed between the two.
    """
    ended_well = any(
        set(made.exit_codes or ()) == {0}
        for made in attempts(store, cell_id)
        if made.run_id == run_id
    )
    return (
        ended_well
        and (attempt_folder(store.cell(cell_id), run_id, attempt) / RECORD_DRAFT).exists()
    )


def record_left(
    request: RunRequest, cell: CellSpec, failure: RunFailure, suffix: str = UNFINISHED
) -> RunRecord:
    """Record an attempt whose supervisor died: as measured if only its record is missing.

    Args:
        request: the attempt.
        cell: its cell.
        failure: what it is recorded as otherwise.
        suffix: of the run id of such a record. It leaves the run's own id free: should the run be
            measured after all, its measurement counts.
    """
    store = Store(request.sweep_folder)
    if _left_a_measurement(store, request.cell_id, request.run_id, request.attempt):
        return publish(request, cell, None)
    return publish(replace(request, run_id=request.run_id + suffix), cell, failure)


def unfinished(store: Store, cell_id: str) -> list[Attempt]:
    """Return the attempts of this machine or of an allocation that left no record, oldest first.

    Left out are runs of Slurm's jobs, runs on other machines, and trainings that are saved: these
    continue. One that has ended is among them where only its record is missing.
    """
    made = attempts(store, cell_id)
    saved = {attempt.run.name for attempt in made if attempt.saved_step is not None}
    return [
        attempt
        for attempt in made
        if attempt.pid is not None
        and attempt.job is None
        and (attempt.node == node_name() or attempt.launcher == ALLOCATION)
        and attempt.run.name not in saved
        and not store.has_runs(cell_id, attempt.run_id)
        and (
            not attempt.has_ended
            or _left_a_measurement(store, cell_id, attempt.run_id, attempt.number)
        )
    ]


def is_alive(store: Store, attempt: Attempt) -> bool:
    """Whether an attempt goes on; of an allocation on other hosts the lock of the sweep tells."""
    return attempt.is_running or (attempt.launcher == ALLOCATION and store.is_locked())


def record_unfinished(store: Store, cells: Iterable[str]) -> None:
    """Record the unfinished runs of some cells as killed, or measured if only the record is missing.

    The same command repeats a killed one.
    """
    for cell_id in cells:
        for attempt in unfinished(store, cell_id):
            if not attempt.is_running:
                facts = {"environment": {"launcher": attempt.launcher}}
                request = request_for(store, attempt.run, attempt.number, **facts)
                record_left(request, read_cell(store, cell_id), RunFailure(Status.killed, KILLED))


# Trainings that a later attempt or a later run goes on with.


def broken_off_trainings(store: Store, cell_id: str, code_hash: str) -> tuple[Path, ...]:
    """Return the attempts of a cell that were killed or cancelled and left checkpoints, newest first.

    A training depends on its cell alone, not on the block of its run, so that any later run of the
    cell may go on with it, unless other code began it. Left out are those that their own run continues:
    interrupted by Ctrl-C, preempted, or saved at the time limit of a job.
    """
    found, statuses = [], {run.run_id: run.status for run in store.runs(cell_id)}
    for attempt in reversed(attempts(store, cell_id)):
        if attempt.code_hash != code_hash:
            continue
        status = statuses.get(attempt.run_id) or statuses.get(attempt.run_id + UNFINISHED)
        is_saved = attempt.saved_step is not None
        is_over = status == Status.killed or (status == Status.timed_out and not is_saved)
        folder = attempt_folder(store.cell(cell_id), attempt.run_id, attempt.number)
        if is_over and whole_checkpoints(folder / CHECKPOINT_FOLDER):
            found.append(folder)
    return tuple(found)
