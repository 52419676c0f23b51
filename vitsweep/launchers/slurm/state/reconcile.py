"""Records for jobs that died or ended before all their work was done, so that every cell has a row."""

import os
import time
from collections.abc import Sequence

from rich.console import Console

from vitsweep.errors import DISK_FULL_ERRNOS
from vitsweep.execution.attempts import record_left
from vitsweep.execution.outcome import RunFailure
from vitsweep.execution.run_request import Run, read_cell_safely, request_for
from vitsweep.files import NAME, append_line
from vitsweep.launchers.slurm.commands import release
from vitsweep.launchers.slurm.state.jobs import (
    CAUSE_PREEMPTED,
    CAUSE_REQUEUED,
    CAUSE_TIME_LIMIT,
    JobArray,
)
from vitsweep.launchers.slurm.state.poll import REFRESH_SECONDS, JobState, poll
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.tables.formatting import count

SECONDS_TO_SHOW = 120.0
"""A file system that several nodes share shows a new file within its caches' lifetime: on NFS a minute."""

HELD_AFTER_LAUNCH_FAILURE = "launch failed requeued held"

STATUS_OF_STATE = {
    "TIMEOUT": Status.timed_out,
    "PREEMPTED": Status.preempted,
    "OUT_OF_MEMORY": Status.out_of_memory,
}
STATUS_OF_CAUSE = {
    CAUSE_TIME_LIMIT: Status.timed_out,
    CAUSE_PREEMPTED: Status.preempted,
    CAUSE_REQUEUED: Status.preempted,
}


def reconcile(store: Store, only: Sequence[JobArray] | None = None) -> list[JobState]:
    """Poll the jobs of a sweep, and record the runs that dead jobs did not finish.

    Jobs that Slurm holds because a node failed while they were launched are released.

    The run that was in flight gets a record; a cell that has no run at all, because its job never came
    to it, gets a row that says why. Any number of processes may do so at once. Such a record has a run
    id of its own, which leaves the run's own id free: if the job was alive after all, its measurement is
    recorded too, and counts.

    Only what acts on a sweep calls this (its launcher, `cancel`, `collect --reconcile`), never what
    only shows it.

    Args:
        store: of the sweep.
        only: these arrays; None for all.

    Returns:
        The states from which it was concluded.
    """
    job_states = poll(store, only, note_ids=True)
    for state in job_states:
        if _is_held_after_launch_failure(state):
            release(state.job.slurm_id)
        in_flight = state.events.in_flight or {"run": None}
        for run in runs_to_record(store, state):
            if run.name == in_flight["run"]:
                _record(store, state, run, failure_of_job(state))
            else:
                _note(store, run, failure_of_job(state))
        if not state.is_live and not state.events.reconciled:
            append_line(state.job.events_path, {"event": "reconciled", "time": time.time()})
    return job_states


def wait_for_records(store: Store, job_states: Sequence[JobState], console: Console) -> None:
    """Wait until the records of runs that jobs have just reported as measured can be read.

    A file system that is slow to show them must not cause them to be measured again.
    """
    reported = [
        (event["cell_id"], f"runs/{event['run_id']}.json")
        for state in job_states
        for event in state.events.of_kind("run_end")
        if event["status"] == Status.measured
        and time.time() - event.get("time", 0.0) < SECONDS_TO_SHOW
        and all(NAME.fullmatch(event.get(key, "")) for key in ("cell_id", "run_id"))
    ]
    deadline, is_said = time.monotonic() + SECONDS_TO_SHOW, False
    while hidden := [each for each in reported if not store.has(*each)]:
        if time.monotonic() > deadline:
            seconds = f"after {SECONDS_TO_SHOW:.0f} s"
            console.print(
                f"The file system does not show {count(len(hidden), 'record')} {seconds}, such as "
                f"`{store.cell(hidden[0][0]) / hidden[0][1]}`: their runs are repeated.",
            )
            return
        if not is_said:
            console.print(
                f"Waiting until the file system shows {count(len(hidden), 'record')} of runs that "
                "jobs have measured.",
            )
        is_said = True
        time.sleep(REFRESH_SECONDS)


def _is_held_after_launch_failure(state: JobState) -> bool:
    """Whether a node failed while the job was launched there; Slurm then holds it for ever.

    A job whose launch fails again and again stays held.
    """
    slurm = state.slurm
    return (
        slurm is not None
        and slurm.reason.replace("_", " ").lower() == HELD_AFTER_LAUNCH_FAILURE
        and state.is_confirmed
        and slurm.restarts <= state.job.array.facts["max_attempts"]
    )


def runs_to_record(store: Store, state: JobState) -> list[Run]:
    """Return the runs of a dead job to account for: in flight, and one per cell that has no run."""
    if state.is_live or state.events.reconciled or state.events.is_done:
        return []
    finished, in_flight = state.events.final_statuses(), state.events.in_flight or {"run": None}
    chosen: dict[str, Run] = {}
    for run in state.job.runs():
        if run.name == in_flight["run"]:
            chosen[run.cell_id] = run
        elif run.name not in finished and not store.has_runs(run.cell_id):
            chosen.setdefault(run.cell_id, run)
    return list(chosen.values())


def _record(store: Store, state: JobState, run: Run, failure: RunFailure) -> None:
    """Record the run that was in flight; it was measured where only its record was not published."""
    of_command = state.job.cells.get(run.cell_id, {})
    environment = run.facts | {"launcher": "slurm", "slurm_job_id": state.job.slurm_id}
    if "code_hash" in of_command:
        environment["code_hash"] = of_command["code_hash"]
    attempt = state.events.num_attempts(run)
    request = request_for(store, run, attempt, environment=environment)
    record_left(
        request, read_cell_safely(store, run.cell_id, of_command.get("measurement")), failure
    )


def _note(store: Store, run: Run, failure: RunFailure) -> None:
    """Keep why a cell that never started has no run: its row says so until it is run."""
    row = {"cell_id": run.cell_id, "sweep": store.name}
    kept = store.kept_row(run.cell_id)
    store.keep_row(row | kept | {"status": str(failure.status), "reason": failure.reason})


def failure_of_job(state: JobState) -> RunFailure:
    """Say why a job did not do all its work: from its own events, else from what Slurm says."""
    slurm, job_id, end = state.slurm, state.job.slurm_id, state.events.end
    if end is not None and not end.get("requeued"):
        status = STATUS_OF_CAUSE.get(end["cause"], Status.killed)
        reason = f"Job {job_id} ended before this run: {end['reason'] or end['cause']}"
        return RunFailure(status, reason)
    if not state.job.array.slurm_id:
        return RunFailure(Status.killed, "The submitting command died before Slurm took the job.")
    if slurm is None:
        return RunFailure(Status.killed, f"Job {job_id} left Slurm without reporting an end.")
    if slurm.state == "CANCELLED" and state.events.last_start is None:
        who = f" ({slurm.reason})" if slurm.reason.startswith("by ") else ""
        return RunFailure(Status.killed, f"Job {job_id} was cancelled{who} before it started.")
    if slurm.exit_code in DISK_FULL_ERRNOS:
        text = os.strerror(slurm.exit_code or 0)
        return RunFailure(Status.killed, f"Job {job_id} could not write its results: {text}.")
    code = f" with exit code {slurm.exit_code}" if slurm.exit_code else ""
    why = f" ({slurm.reason})" if slurm.reason not in ("", "None") else ""
    log = _log_of(state) if slurm.exit_code else ""
    reason = f"Job {job_id} ended as {slurm.state}{why}{code}, without reporting an end.{log}"
    return RunFailure(STATUS_OF_STATE.get(slurm.state, Status.killed), reason)


def _log_of(state: JobState) -> str:
    """Return which log tells why a job left with an exit code, " See `FILE`."; "" where there is none."""
    logs = sorted(state.job.array.folder.glob(f"{state.job.slurm_id}_*_log.out"))
    return f" See `{logs[0]}`." if logs else ""
