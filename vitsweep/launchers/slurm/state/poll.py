"""The state of a sweep's jobs: from the events they wrote, then from Slurm's queue."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from vitsweep.errors import STORAGE_ERRNOS
from vitsweep.execution.attempts import record_left
from vitsweep.execution.outcome import RunFailure
from vitsweep.execution.run_request import Run, read_cell, request_for
from vitsweep.files import NAME, append_line, write_atomically
from vitsweep.launchers.slurm.commands import (
    SlurmJob,
    controller_settings,
    release,
    squeue,
    submitted_scripts,
)
from vitsweep.launchers.slurm.state.jobs import (
    CAUSE_PREEMPTED,
    CAUSE_REQUEUED,
    CAUSE_TIME_LIMIT,
    ArrayJob,
    JobArray,
    JobEvents,
    job_arrays,
)
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.results.sweeps import sweep_argument
from vitsweep.tables.formatting import count

MOST_DEAD_JOBS = 3
"""Jobs that ended without recording all their runs, of which it is shown how they ended."""

SECONDS_TO_SUBMIT = 60
"""An array without a Slurm id is being submitted; after this long its submitting command is dead."""

SECONDS_OF_SILENCE = 120
"""A job writes an event at least every 30 s; with a later one than this it is alive, even if Slurm
does not list it (another cluster's Slurm, a controller that lost its state)."""

FIRST_POLL_SECONDS, LAST_POLL_SECONDS = 5.0, 60.0
"""A waiting command asks Slurm after 5 s, then after 10, 20, 40 and every 60 s; after 5 s again once a
job's state has changed. A hundred commands that wait ask a controller fewer than ten things a second."""

REFRESH_SECONDS = 1.0
"""How often a waiting command reads what jobs wrote."""

State = Literal["waiting", "running", "ended", "gone", "unknown"]


@dataclass(frozen=True)
class JobState:
    """The state of one job.

    Attributes:
        job: which one.
        events: that it wrote.
        state: `waiting` or `running` in Slurm; `ended` where its events say so; `gone` where Slurm
            no longer has it and its events do not say why; `unknown` where Slurm does not answer,
            is not the cluster to which the job was submitted, or hides the job from this user.
        slurm: what Slurm says, or None where it knows nothing.
    """

    job: ArrayJob
    events: JobEvents
    state: State
    slurm: SlurmJob | None

    @property
    def is_live(self) -> bool:
        """Whether it may still run something."""
        return self.state in ("waiting", "running", "unknown")

    @property
    def is_confirmed(self) -> bool:
        """Whether Slurm says that the job with this id runs the batch script of this array.

        The id is read from a file of the sweep, which may be false, or from before ids were reused.
        """
        return self.slurm is not None and self.job.array.owns(self.slurm.script)

    @property
    def remaining_runs(self) -> list[Run]:
        """Runs still to be done; not those of cells that ended otherwise, or are pruned after screening."""
        return self.job.remaining_runs(self.events, self.events.final_statuses())


def poll(
    store: Store, only: Sequence[JobArray] | None = None, *, note_ids: bool = False
) -> list[JobState]:
    """Return the state of all jobs of a sweep, or of those of some arrays.

    Slurm is asked before the events are read: a job that has left the queue by then has written its
    last event.

    Args:
        store: of the sweep.
        only: these arrays.
        note_ids: write the ids that submitting commands died before they could; else nothing is written.
    """
    arrays = job_arrays(store) if only is None else only
    jobs = [(job, job.events()) for array in arrays for job in array.jobs()]
    if all(events.is_done for _, events in jobs):
        return [JobState(job, events, "ended", None) for job, events in jobs]
    settings = controller_settings()
    unknown_or_here = ("", settings.get("ClusterName", ""))
    here = [array for array in arrays if array.facts.get("cluster", "") in unknown_or_here]
    found = _found_ids(here)
    if found:
        here, arrays = ([_with_id(a, found, note_ids) for a in each] for each in (here, arrays))
        jobs = [(job, job.events()) for array in arrays for job in array.jobs()]
    queued = squeue({array.slurm_id for array in here} - {""})
    jobs = [(job, events if events.is_done else job.events()) for job, events in jobs]
    if queued is None:
        return [_state_of(job, events, None, slurm_answers=False) for job, events in jobs]
    # once per array: `slurm_id` reads files
    answers = {
        a.folder: (found is not None or a.slurm_id != "") and not _is_hidden(a, settings)
        for a in here
    }
    states = []
    for job, events in jobs:
        slurm = _own(job, queued) if job.array.folder in answers else None
        is_answer = slurm is not None or answers.get(job.array.folder, False)
        states.append(_state_of(job, events, slurm, slurm_answers=is_answer))
    return states


def states_over_time(ask: Callable[[], list[JobState]]) -> Iterator[list[JobState]]:
    """Yield the states of jobs without end: jobs' events as they are, and Slurm's last answer.

    Slurm is asked seldom while nothing changes, and at once where a job has written its end.

    Args:
        ask: asks Slurm, such as `poll`.
    """
    pause, ask_at, job_states = FIRST_POLL_SECONDS, 0.0, list[JobState]()
    while True:
        known = [replace(s, events=s.job.events(s.events)) for s in job_states]
        num_ended = [
            sum(s.is_live and s.events.has_ended for s in of) for of in (job_states, known)
        ]
        if time.monotonic() >= ask_at or num_ended[1] > num_ended[0]:
            known = ask()
            is_same = [s.state for s in known] == [s.state for s in job_states]
            pause = min(2 * pause, LAST_POLL_SECONDS) if is_same else FIRST_POLL_SECONDS
            ask_at = time.monotonic() + pause
        job_states = known
        yield job_states


def _found_ids(arrays: Sequence[JobArray]) -> dict[Path, str] | None:
    """Return folder -> id of this user's arrays whose submitting command died before it noted the id.

    An array is recognized by its batch script, which lies in its folder. None where an array has no id
    and Slurm does not say whether it was submitted.
    """
    without_id = [array for array in arrays if not array.slurm_id]
    owners = {array.folder.stat().st_uid for array in without_id}
    scripts = submitted_scripts(owners) if owners else {}
    return (
        None
        if scripts is None
        else {
            array.folder: array_id
            for script, array_id in scripts.items()
            for array in without_id
            if array.owns(script) and _is_own(array)
        }
    )


def _with_id(array: JobArray, found: Mapping[Path, str], note: bool) -> JobArray:
    if array.folder not in found:
        return array
    if note:
        write_atomically(array.folder / "slurm_id", found[array.folder], durable=True)
    return replace(array, found_id=found[array.folder])


def _is_own(array: JobArray) -> bool:
    """Whether this user submitted an array."""
    return array.folder.stat().st_uid == os.getuid()


def _is_hidden(array: JobArray, settings: Mapping[str, str]) -> bool:
    """Whether it means nothing that Slurm lists no job of an array for this user.

    Another user's array may have no id yet, and a cluster may hide the jobs of others.
    """
    hides_jobs = "jobs" in settings.get("PrivateData", "").split(",")
    return not _is_own(array) and (hides_jobs or not array.slurm_id)


def _own(job: ArrayJob, known: dict[str, SlurmJob]) -> SlurmJob | None:
    """Return what Slurm says about a job, unless its id was given to another one since."""
    slurm = known.get(job.slurm_id)
    return slurm if slurm is None or not slurm.script or job.array.owns(slurm.script) else None


def _state_of(
    job: ArrayJob, events: JobEvents, slurm: SlurmJob | None, *, slurm_answers: bool
) -> JobState:
    if events.has_ended and not _is_restarted(events, slurm):
        return JobState(job, events, "ended", slurm)
    if not slurm_answers:
        return JobState(job, events, "unknown", slurm)
    if slurm is not None and slurm.is_live:
        return JobState(job, events, "waiting" if slurm.state == "PENDING" else "running", slurm)
    if slurm is None and _is_recent(events.last_time, SECONDS_OF_SILENCE):
        return JobState(job, events, "running", slurm)
    if not job.array.slurm_id and _is_recent(job.array.facts["time"], SECONDS_TO_SUBMIT):
        return JobState(job, events, "waiting", slurm)
    return JobState(job, events, "gone", slurm)


def _is_recent(time_s: float, seconds: float) -> bool:
    """Whether a time was at most so long ago; one far in the future was written before the clock was set."""
    return abs(time.time() - time_s) < seconds


def _is_restarted(events: JobEvents, slurm: SlurmJob | None) -> bool:
    """Return whether Slurm holds a job whose events say that it has ended.

    Slurm may have requeued it since. A job that has just written its end is still in the queue too.
    """
    if slurm is None or not slurm.is_live:
        return False
    return slurm.restarts > events.restart or events.end is None


def pending_runs(job_states: Sequence[JobState]) -> list[Run]:
    """Return the runs that live jobs will still do."""
    return [run for state in job_states if state.is_live for run in state.remaining_runs]


# Making the store agree with what has become of the jobs.


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
        and _is_recent(event.get("time", 0.0), SECONDS_TO_SHOW)
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
    facts = state.job.cells.get(run.cell_id, {})
    environment: dict[str, object] = {"launcher": "slurm", "slurm_job_id": state.job.slurm_id}
    if "code_hash" in facts:
        environment["code_hash"] = facts["code_hash"]
    attempt = state.events.num_attempts(run)
    request = request_for(store, run, attempt, environment=environment)
    record_left(request, read_cell(store, run.cell_id, state.job.of_command(run.cell_id)), failure)


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
        when = "without reporting an end" if state.events.last_start else "before it started"
        reason = f"Job {job_id} left Slurm {when}; `sacct -j {job_id}` may tell why."
        return RunFailure(Status.killed, reason)
    if slurm.state == "CANCELLED" and state.events.last_start is None:
        return RunFailure(Status.killed, f"Job {job_id} was cancelled before it started.")
    if slurm.exit_code in STORAGE_ERRNOS:
        text = os.strerror(slurm.exit_code or 0)
        return RunFailure(Status.killed, f"Job {job_id} could not write its results: {text}.")
    code = f" with exit code {slurm.exit_code}" if slurm.exit_code else ""
    why = f" ({slurm.reason})" if slurm.reason not in ("", "None") else ""
    logs = sorted(state.job.array.folder.glob(f"{state.job.slurm_id}_*_log.out"))
    log = f" See `{logs[0]}`." if logs and slurm.exit_code else ""
    reason = f"Job {job_id} ended as {slurm.state}{why}{code}, without reporting an end.{log}"
    return RunFailure(STATUS_OF_STATE.get(slurm.state, Status.killed), reason)


def reconcile_hint(store: Store, job_states: Sequence[JobState]) -> str:
    """Return how to record the runs that dead jobs did not finish, or "" where there are none."""
    dead = [state for state in job_states if runs_to_record(store, state)]
    if not dead:
        return ""
    head = (
        f"{count(len(dead), 'job')} ended without recording all runs: `vitsweep collect "
        f"{sweep_argument(store)} --reconcile` records why; the same command runs them again."
    )
    return "\n  ".join([head, *(failure_of_job(state).reason for state in dead[:MOST_DEAD_JOBS])])
