"""Every cell ends in a row: what jobs left behind that died, or ended without doing all their work."""

import os
import time
from collections.abc import Sequence

from vitsweep.execution.frozen_cell import read_cell
from vitsweep.execution.outcome import Verdict, publish
from vitsweep.execution.run_request import RunRequest
from vitsweep.launchers.slurm.node.coordinator import FULL
from vitsweep.launchers.slurm.node.signals import TIME_LIMIT
from vitsweep.launchers.slurm.state.job_events import Run
from vitsweep.launchers.slurm.state.job_files import Array
from vitsweep.launchers.slurm.state.poll import JobState, look
from vitsweep.results.record import Status
from vitsweep.results.store import Store, append_line

STATUS_OF_STATE = {
    "TIMEOUT": Status.timed_out,
    "PREEMPTED": Status.preempted,
    "OUT_OF_MEMORY": Status.out_of_memory,
}


def reconcile(store: Store, only: Sequence[Array] | None = None) -> list[JobState]:
    """Look at all jobs of a sweep, and record what the dead ones left behind.

    A run that was in flight is recorded, and one run of every cell that has no record at all. Any
    number of processes may do so at once: the first record of a run stands.
    """
    seen = look(store, only)
    for one in seen:
        if not one.live and not one.life.closed:
            _close(store, one)
    return seen


def _close(store: Store, seen: JobState) -> None:
    if seen.left:
        verdict = verdict_of(seen)
        for run in _unrecorded(store, seen):
            _record(store, seen, run, verdict)
    append_line(seen.element.life_path, {"event": "closed", "time": time.time()})


def _unrecorded(store: Store, seen: JobState) -> list[Run]:
    """Runs to record: the one in flight, and the first of each cell without any."""
    ended, flying = seen.life.ended(), seen.life.in_flight or {"run": None}
    wanted: dict[str, Run] = {}
    for run in seen.element.runs():
        if run.name == flying["run"]:
            wanted[run.cell_id] = run
        elif run.name not in ended and not _has_record(store, run.cell_id):
            wanted.setdefault(run.cell_id, run)
    return list(wanted.values())


def _has_record(store: Store, cell_id: str) -> bool:
    return any((store.cell(cell_id) / "runs").glob("*.json"))


def _record(store: Store, seen: JobState, run: Run, verdict: Verdict) -> None:
    flying = seen.life.in_flight or {"run": None}
    attempt = seen.life.attempts(run) + (run.name != flying["run"])
    request = RunRequest(
        sweep_folder=store.root,
        cell_id=run.cell_id,
        run_id=run.run_id(attempt),
        block=run.block,
        position=run.position,
        attempt=attempt,
        init_method="",
        environment={"launcher": "slurm", "slurm_job_id": seen.element.name},
    )
    publish(request, read_cell(store, run.cell_id), verdict)


def verdict_of(seen: JobState) -> Verdict:
    """Say why a job did not do all its work: by its own word, else by Slurm's."""
    job, name = seen.job, seen.element.name
    end = seen.life.end
    if end is not None and not end.get("requeued"):
        status = STATUS_OF_CAUSE.get(end["cause"], Status.killed)
        return Verdict(status, f"Job {name} ended before this run: {end['reason'] or end['cause']}")
    if not seen.element.array.slurm_id:
        return Verdict(Status.killed, "The submitting command died before Slurm took the job.")
    if job is None:
        return Verdict(Status.killed, f"Job {name} left Slurm without a word.")
    if job.exit_code in FULL:
        text = os.strerror(job.exit_code or 0)
        return Verdict(Status.killed, f"Job {name} could not write its results: {text}.")
    code = f" with exit code {job.exit_code}" if job.exit_code else ""
    why = f" ({job.reason})" if job.reason not in ("", "None") else ""
    reason = f"Job {name} ended as {job.state}{why}{code}, without a word of its own."
    return Verdict(STATUS_OF_STATE.get(job.state, Status.killed), reason)


STATUS_OF_CAUSE = {TIME_LIMIT: Status.timed_out, "preempted": Status.preempted}
