"""How the jobs of a sweep are: by their own word first, then by Slurm's queue and accounting."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vitsweep.launchers.slurm.state.job_events import JobEvents
from vitsweep.launchers.slurm.state.job_files import Array, Element, arrays
from vitsweep.launchers.slurm.state.slurm_cli import Job, accounting, queue
from vitsweep.results.store import Store

SECONDS_TO_BE_KNOWN = 60
"""An array without an id is being submitted; after this long the submitting command is dead."""

State = Literal["waiting", "running", "ended", "gone", "unknown"]


@dataclass(frozen=True)
class JobState:
    """One job as it is.

    Attributes:
        element: the job.
        life: what it wrote.
        state: `waiting` or `running` in Slurm, `ended` by its own word, `gone` without one;
            `unknown` where Slurm does not answer.
        job: what Slurm says, or None where it knows nothing.
    """

    element: Element
    life: JobEvents
    state: State
    job: Job | None

    @property
    def live(self) -> bool:
        """Whether it may still run something."""
        return self.state in ("waiting", "running", "unknown")

    @property
    def left(self) -> int:
        """Runs that it has not ended."""
        return len(self.element.runs()) - len(self.life.ended())


def look(store: Store, only: Sequence[Array] | None = None) -> list[JobState]:
    """Look at all jobs of a sweep.

    Slurm is asked before the lives are read: a job that has left the queue by then has written its
    last word.
    """
    wanted = arrays(store) if only is None else only
    lives = [(element, element.life()) for array in wanted for element in array.elements()]
    if all(_settled(life) for _, life in lives):
        return [JobState(element, life, "ended", None) for element, life in lives]
    queued = queue({array.slurm_id for array in wanted} - {""})
    lives = [(e, life if _settled(life) else e.life()) for e, life in lives]
    if queued is None:
        return [_seen(element, life, None, answered=False) for element, life in lives]
    jobs = _forgotten(lives, queued) | queued
    return [_seen(e, life, jobs.get(e.name), answered=True) for e, life in lives]


def _settled(life: JobEvents) -> bool:
    return life.closed or (life.end is not None and not life.end.get("requeued"))


def _forgotten(
    lives: Sequence[tuple[Element, JobEvents]], queued: dict[str, Job]
) -> dict[str, Job]:
    """Ask the accounting about jobs that the controller has forgotten."""
    unknown = [e for e, life in lives if e.name not in queued and not _settled(life)]
    return accounting({element.array.slurm_id for element in unknown} - {""})


def _seen(element: Element, life: JobEvents, job: Job | None, *, answered: bool) -> JobState:
    if _settled(life):
        return JobState(element, life, "ended", job)
    if not answered:
        return JobState(element, life, "unknown", job)
    if job is not None and job.live:
        return JobState(element, life, "waiting" if job.state == "PENDING" else "running", job)
    age = time.time() - element.array.facts["time"]
    if not element.array.slurm_id and age < SECONDS_TO_BE_KNOWN:
        return JobState(element, life, "waiting", job)
    return JobState(element, life, "gone", job)


def pending_runs(seen: Sequence[JobState]) -> Counter[str]:
    """Return cell -> runs that live jobs will still do."""
    counts: Counter[str] = Counter()
    for one in seen:
        ended = one.life.ended() if one.live else {}
        over = {
            r.cell_id for r in one.element.runs() if ended.get(r.name, "measured") != "measured"
        }
        for run in one.element.runs() if one.live else ():
            counts[run.cell_id] += run.name not in ended and run.cell_id not in over
    return +counts
