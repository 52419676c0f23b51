"""How the jobs of a sweep are: by their own word first, then by Slurm's queue and accounting."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vitsweep.results.store import Store
from vitsweep.sweep.slurm_commands import Job, accounting, queue
from vitsweep.sweep.slurm_jobs import Array, Element, Life, arrays

SECONDS_TO_BE_KNOWN = 60
"""An array without an id is being submitted; after this long the submitting command is dead."""

State = Literal["waiting", "running", "ended", "gone", "unknown"]


@dataclass(frozen=True)
class Seen:
    """One job as it is.

    Attributes:
        element: the job.
        life: what it wrote.
        state: `waiting` or `running` in Slurm, `ended` by its own word, `gone` without one;
            `unknown` where Slurm does not answer.
        job: what Slurm says, or None where it knows nothing.
    """

    element: Element
    life: Life
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


def look(store: Store, only: Sequence[Array] | None = None) -> list[Seen]:
    """Look at all jobs of a sweep.

    Slurm is asked before the lives are read: a job that has left the queue by then has written its
    last word.
    """
    wanted = arrays(store) if only is None else only
    elements = [element for array in wanted for element in array.elements()]
    if all(_settled(element.life()) for element in elements):
        return [Seen(element, element.life(), "ended", None) for element in elements]
    ids = {array.slurm_id for array in wanted} - {""}
    queued = queue(ids)
    if queued is None:
        return [_seen(element, None, answered=False) for element in elements]
    jobs = _with_accounting(elements, queued)
    return [_seen(element, jobs.get(element.name), answered=True) for element in elements]


def _settled(life: Life) -> bool:
    return life.closed or (life.end is not None and not life.end.get("requeued"))


def _with_accounting(elements: Sequence[Element], queued: dict[str, Job]) -> dict[str, Job]:
    """Ask the accounting about jobs that the controller has forgotten."""
    forgotten = {
        element.array.slurm_id
        for element in elements
        if element.name not in queued and not _settled(element.life())
    } - {""}
    return accounting(forgotten) | queued


def _seen(element: Element, job: Job | None, *, answered: bool) -> Seen:
    life = element.life()
    if _settled(life):
        return Seen(element, life, "ended", job)
    if not answered:
        return Seen(element, life, "unknown", job)
    if job is not None and job.live:
        return Seen(element, life, "waiting" if job.state == "PENDING" else "running", job)
    age = time.time() - element.array.facts["time"]
    if not element.array.slurm_id and age < SECONDS_TO_BE_KNOWN:
        return Seen(element, life, "waiting", job)
    return Seen(element, life, "gone", job)


def pending_runs(seen: Sequence[Seen]) -> Counter[str]:
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
