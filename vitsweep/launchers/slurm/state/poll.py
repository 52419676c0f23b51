"""The state of a sweep's jobs: from the events they wrote, then from Slurm's queue and accounting."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from vitsweep.execution.run_request import Run
from vitsweep.files import write_atomically
from vitsweep.launchers.slurm.commands import (
    SlurmJob,
    controller_settings,
    sacct,
    squeue,
    submitted_scripts,
)
from vitsweep.launchers.slurm.state.jobs import ArrayJob, JobArray, JobEvents, job_arrays
from vitsweep.results.store import Store

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
    def num_remaining_runs(self) -> int:
        """Number of runs still to be done."""
        return len(self.remaining_runs)

    @property
    def remaining_runs(self) -> list[Run]:
        """Runs still to be done; not those of cells that ended otherwise, or stay at their look."""
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
    here = [array for array in arrays if _is_on(array, settings.get("ClusterName", ""))]
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
    known = _accounted([j for j in jobs if j[0].array.folder in answers], queued) | queued
    states = []
    for job, events in jobs:
        slurm = _own(job, known) if job.array.folder in answers else None
        is_answer = slurm is not None or answers.get(job.array.folder, False)
        states.append(_state_of(job, events, slurm, slurm_answers=is_answer))
    return states


class PollTimes:
    """When a waiting command asks Slurm's controller again: seldom while nothing changes."""

    def __init__(self) -> None:
        self._seconds, self._next, self._states = FIRST_POLL_SECONDS, 0.0, list[State]()

    def is_due(self) -> bool:
        """Whether it is time to ask."""
        return time.monotonic() >= self._next

    def asked(self, job_states: Sequence[JobState]) -> None:
        """Choose the next time, by what Slurm has just said."""
        states = [each.state for each in job_states]
        is_same = states == self._states
        self._seconds = min(2 * self._seconds, LAST_POLL_SECONDS) if is_same else FIRST_POLL_SECONDS
        self._states, self._next = states, time.monotonic() + self._seconds


def states_over_time(ask: Callable[[], list[JobState]]) -> Iterator[list[JobState]]:
    """Yield the states of jobs without end: jobs' events as they are, and what Slurm said last.

    Slurm is asked at `PollTimes`, and at once where a job has written its end.

    Args:
        ask: asks Slurm, such as `poll`.
    """
    times, job_states = PollTimes(), list[JobState]()
    while True:
        known = [replace(state, events=state.job.events()) for state in job_states]
        has_ended = any(s.is_live and s.events.has_ended for s in known)
        was_ended = any(s.is_live and s.events.has_ended for s in job_states)
        if times.is_due() or (has_ended and not was_ended):
            times.asked(known := ask())
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
        write_atomically(array.folder / "slurm_id", found[array.folder])
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


def _is_on(array: JobArray, cluster: str) -> bool:
    """Whether an array was submitted to this cluster, as far as is known."""
    return array.facts.get("cluster", "") in ("", cluster)


def _accounted(
    jobs: Sequence[tuple[ArrayJob, JobEvents]], queued: dict[str, SlurmJob]
) -> dict[str, SlurmJob]:
    """Ask the accounting how jobs ended that the controller does not know any more.

    A controller that lost its state leaves them pending or running there for ever.
    """
    forgotten = [j for j, events in jobs if j.slurm_id not in queued and not events.has_ended]
    found = sacct({job.array.slurm_id for job in forgotten} - {""})
    return {job_id: slurm for job_id, slurm in found.items() if not slurm.is_live}


def _state_of(
    job: ArrayJob, events: JobEvents, slurm: SlurmJob | None, *, slurm_answers: bool
) -> JobState:
    if events.has_ended and not _is_restarted(events, slurm):
        return JobState(job, events, "ended", slurm)
    if not slurm_answers:
        return JobState(job, events, "unknown", slurm)
    if slurm is not None and slurm.is_live:
        return JobState(job, events, "waiting" if slurm.state == "PENDING" else "running", slurm)
    if slurm is None and events.last_time > time.time() - SECONDS_OF_SILENCE:
        return JobState(job, events, "running", slurm)
    age_s = time.time() - job.array.facts["time"]
    if not job.array.slurm_id and age_s < SECONDS_TO_SUBMIT:
        return JobState(job, events, "waiting", slurm)
    return JobState(job, events, "gone", slurm)


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
