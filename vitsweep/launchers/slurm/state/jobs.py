"""Files of the job arrays of a sweep: what each job has to run, and the events it writes.

```
jobs/<array>/array.json       what is requested from Slurm, written before the request
jobs/<array>/slurm_id         the array's id in Slurm
jobs/<array>/tasks.jsonl      one line per job of the array: its blocks
jobs/<array>/key              secret with which agents of a job authenticate
jobs/<array>/<index>.jsonl    events of a job: start, runs, heartbeats, signals, end
jobs/<array>/*_log.out        output of its processes
```
Only the job's first node writes its events, so the file stays whole on file systems where appends of
several nodes mix.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.run_request import Run
from vitsweep.files import NAME, fits, read_bytes, read_text
from vitsweep.foreign import MOST_JSON_BYTES, OF_SWEEP, parsed_json, read_lines
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, Status
from vitsweep.results.store import Store

MOST_ID_BYTES = 100
"""Of the file that holds a number which Slurm gave."""

# Events that a job writes about itself: its starts, runs, heartbeats, signals and end.


MAX_KILLS = 3
"""A cell is given up by a job after so many attempts that something from outside stopped for good."""

CAUSE_TIME_LIMIT = "time limit"
CAUSE_PREEMPTED = "preempted"
CAUSE_REQUEUED = "requeued"
CAUSE_CANCELLED = "cancelled"
CAUSE_DONE = "done"
"""Causes of a `job_end` event that others act on."""


_TEXT, _NUMBER = (str,), (int, float)
_KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("event", "run", "run_id", "cell_id", "status", "cause"), _TEXT),
    **dict.fromkeys(("reason",), (str, type(None))),
    **{"images_per_second": (*_NUMBER, type(None))},
    **{"time": _NUMBER, "restart": (int,), "cells": (list,), "saved_step": (int, type(None))},
}
_NEEDED = {
    "job_start": ("restart",),
    "job_end": ("cause",),
    "run_start": ("run",),
    "run_end": ("run", "status", "will_repeat"),
    "taken_over": ("cells",),
}


@dataclass(frozen=True)
class JobEvents:
    """All events of one job, oldest first.

    Kinds: `job_start`, `warm_up_start`, `warm_up_end`, `run_start`, `run_end`, `heartbeat`, `signal`,
    `job_end`, written by the job; `taken_over`, written by a job that was taken for dead and starts
    again; `reconciled`, written by whoever recorded the runs that a dead job did not finish.
    """

    events: list[dict[str, Any]]
    num_bytes: int = 0

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events of some kinds."""
        return [event for event in self.events if event["event"] in kinds]

    def _last_of_kind(self, *kinds: str) -> dict[str, Any] | None:
        return next(iter(self.of_kind(*kinds)[::-1]), None)

    @property
    def last_start(self) -> dict[str, Any] | None:
        """The latest start of the job, or None before the first."""
        return self._last_of_kind("job_start")

    @property
    def end(self) -> dict[str, Any] | None:
        """The end that the job wrote since its latest start; None while it runs or waits."""
        last = self._last_of_kind("job_start", "job_end")
        return last if last and last["event"] == "job_end" else None

    @property
    def last_time(self) -> float:
        """When the job wrote its latest event, in seconds since 1970; 0 before the first."""
        return max(
            (e.get("time", 0.0) for e in self.events if e["event"] != "reconciled"), default=0
        )

    @property
    def reconciled(self) -> bool:
        """Whether the runs that the job did not finish are recorded already."""
        last = self._last_of_kind("job_start", "reconciled")
        return last is not None and last["event"] == "reconciled"

    @property
    def reconciled_at(self) -> float:
        """When these runs were first recorded since the latest start, in seconds since 1970; inf before."""
        times: list[float] = []
        for event in self.of_kind("job_start", "reconciled"):
            times = [] if event["event"] == "job_start" else [*times, event["time"]]
        return min(times, default=inf)

    @property
    def has_ended(self) -> bool:
        """Whether nothing will run any more, unless Slurm starts the job again."""
        return self.reconciled or (self.end is not None and not self.end.get("requeued"))

    @property
    def is_done(self) -> bool:
        """Whether the job has done all its work."""
        return self.end is not None and self.end["cause"] == CAUSE_DONE

    @property
    def restart(self) -> int:
        """Number of the latest start of the job: 0 for the first, -1 before it."""
        return -1 if self.last_start is None else int(self.last_start["restart"])

    @property
    def in_flight(self) -> dict[str, Any] | None:
        """The `run_start` of the run that has not ended, or None."""
        last = self._last_of_kind("run_start", "run_end")
        return last if last and last["event"] == "run_start" else None

    @property
    def ended_in_warm_up(self) -> bool:
        """Whether a start of the job ended while its nodes were warmed up."""
        return len(self.of_kind("warm_up_start")) > len(self.of_kind("warm_up_end"))

    def num_attempts(self, run: Run) -> int:
        """Return how often a run has started."""
        return sum(event["run"] == run.name for event in self.of_kind("run_start"))

    def num_saved_attempts(self, run: Run) -> int:
        """Return how many attempts of a run have saved its training after more steps than before."""
        ends = (event for event in self.of_kind("run_end") if event["run"] == run.name)
        return len({event.get("saved_step") or 0 for event in ends} - {0})

    def final_statuses(self) -> dict[str, str]:
        """Return run -> status, of the runs that the job will not repeat."""
        return {e["run"]: e["status"] for e in self.of_kind("run_end") if not e["will_repeat"]}

    def cells_to_skip(self, runs: Iterable[Run], final_statuses: Mapping[str, str]) -> set[str]:
        """Return the cells of which the job does no further run.

        One that ended by itself without being measured would end the same way again. One that was
        killed or preempted still has its other blocks, until that has happened `MAX_KILLS` times.
        Other jobs have those that were submitted again while this job was taken for dead.

        Args:
            runs: of the job.
            final_statuses: run name -> status, of the runs that have ended.
        """
        kills: Counter[str] = Counter()
        found = {cell_id for event in self.of_kind("taken_over") for cell_id in event["cells"]}
        for run in runs:
            status = final_statuses.get(run.name, Status.measured)
            if status in STOPPED_FROM_OUTSIDE:
                kills[run.cell_id] += max(1, self.num_attempts(run))
            if kills[run.cell_id] >= MAX_KILLS or status not in (
                Status.measured,
                *STOPPED_FROM_OUTSIDE,
            ):
                found.add(run.cell_id)
        return found


@dataclass(frozen=True)
class Work:
    """What the jobs of an array have to run, and with which secret their nodes meet.

    Whoever can write into the folder of a sweep can replace these files. The batch script, which Slurm
    keeps, holds their digest.

    Attributes:
        tasks: text of `tasks.jsonl`.
        secret: text of `key`.
    """

    tasks: str
    secret: str

    @property
    def digest(self) -> str:
        """SHA-256 of both."""
        return hashlib.sha256(f"{self.tasks}\n{self.secret}".encode()).hexdigest()


@dataclass(frozen=True)
class JobArray:
    """One job array of a sweep.

    Attributes:
        folder: `jobs/<array>` in the sweep folder.
        found_id: its id, where the submitting command did not note it and Slurm has returned it.
    """

    folder: Path
    found_id: str = ""

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What was requested from Slurm.

        Raises:
            VitsweepError: the file is damaged; it is named. `jobs` and `job` raise the same.
        """
        path = self.folder / "array.json"
        return self._parsed(path, read_bytes(path, MOST_JSON_BYTES))

    @property
    def slurm_id(self) -> str:
        """Id of the array in Slurm; "" where the submitting command died before it was noted."""
        if self.found_id:
            return self.found_id
        path = self.folder / "slurm_id"
        if path.exists() and (text := read_text(path, MOST_ID_BYTES)):
            return self._checked_id(path, text)
        found = ((path, e) for path in self.folder.glob("*.jsonl") for e in read_lines(path))
        named = (self._checked_id(path, e["array_id"]) for path, e in found if "array_id" in e)
        return next(named, "")

    @staticmethod
    def _checked_id(path: Path, text: object) -> str:
        """Return an id of Slurm, which its commands are given: it must be no option of theirs."""
        if not re.fullmatch(r"[0-9]{1,12}", found := str(text).strip()):
            raise VitsweepError(f"`{path}` is damaged: {found[:40]!r} is no id of a job array.")
        return found

    def owns(self, script: str) -> bool:
        """Whether a batch script is the one of this array; the folder may have been moved since."""
        return Path(script).parent.name == self.folder.name

    def jobs(self) -> Iterator["ArrayJob"]:
        """Yield the jobs of the array, by index."""
        path = self.folder / "tasks.jsonl"
        lines = read_bytes(path, MOST_JSON_BYTES).splitlines()
        if len(lines) != self.facts.get("num_jobs", len(lines)):
            raise self._damage(path, f"it has {len(lines)} of {self.facts['num_jobs']} lines")
        for index, line in enumerate(lines):
            yield ArrayJob(self, index, self._parsed(path, line))

    def work(self, digest: str) -> Work:
        """Return what the jobs have to run, as the command wrote it that submitted them.

        Raises:
            VitsweepError: it is something else, or cannot be read.
        """
        try:
            work = Work(read_text(self.folder / "tasks.jsonl"), read_text(self.folder / "key"))
            if work.digest == digest:
                return work
        except (OSError, ValueError) as error:
            raise VitsweepError(f"This job is unreadable ({error}): repeat its command.") from error
        raise VitsweepError(
            f"`tasks.jsonl` or `key` in `{self.folder}` is not what the command wrote that submitted this "
            "job: somebody has changed it since, and nothing is run. Type the command again."
        )

    def job(self, index: int, work: Work) -> "ArrayJob":
        """Return one job of the array, of its work."""
        line = work.tasks.encode().splitlines()[index]
        return ArrayJob(self, index, self._parsed(self.folder / "tasks.jsonl", line))

    def _parsed(self, path: Path, text: bytes) -> dict[str, Any]:
        try:
            parsed = parsed_json(text.decode(), OF_SWEEP)
            if not isinstance(parsed, dict):
                raise ValueError("it holds no section")
        except ValueError as error:
            raise self._damage(path, error) from error
        return dict(parsed)

    @staticmethod
    def _damage(path: Path, what: object) -> VitsweepError:
        return VitsweepError(
            f"`{path}` is damaged ({what}): restore it from a backup. Or remove the folder `{path.parent}` "
            "once Slurm runs none of its jobs: what was measured lies in `cells/`, and is kept."
        )


@dataclass(frozen=True)
class ArrayJob:
    """One job (Slurm: array task) of a job array.

    Attributes:
        array: the array.
        index: in the array, from 0.
        task: its line of `tasks.jsonl`.
    """

    array: JobArray
    index: int
    task: dict[str, Any]

    @property
    def slurm_id(self) -> str:
        """Its id as Slurm's tools show it, such as `123_4`."""
        return f"{self.array.slurm_id}_{self.index}"

    @property
    def events_path(self) -> Path:
        """File to which it writes its events."""
        return self.array.folder / f"{self.index}.jsonl"

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """Cell id -> settings (`of_command`) and `code_hash` of its command, `sha256` of what that froze."""
        cells: dict[str, dict[str, Any]] = self.task.get("cells", {})
        return cells

    def of_command(self, cell_id: str) -> dict[str, dict[str, Any]]:
        """Return the settings of a cell that belong to the command that submitted it, by group.

        Jobs of earlier versions name those of `measurement` alone.
        """
        facts = self.cells.get(cell_id, {})
        return {group: part for group, part in facts.items() if isinstance(part, dict)}

    def store(self) -> Store:
        """Return the sweep, in which this job runs the cells that its command froze and no others."""
        digests = {cell_id: facts.get("sha256", "") for cell_id, facts in self.cells.items()}
        store = Store(self.array.folder.parents[1], digests)
        store.metrics = self.task.get("metrics", {})
        return store

    def events(self, before: JobEvents | None = None) -> JobEvents:
        """Return the events it has written by now: `before` where its file has not grown since."""
        path = self.events_path
        size = path.stat().st_size if path.exists() else 0
        if before and before.num_bytes == size:
            return before
        found = [e for e in read_lines(path) if isinstance(e.get("event"), str)]
        return JobEvents([e for e in found if fits(e, _KINDS, _NEEDED.get(e["event"], ()))], size)

    def remaining_runs(
        self, events: JobEvents, final_statuses: Mapping[str, str], left_out: Collection[str] = ()
    ) -> list[Run]:
        """Return the runs that are still to be done, in order.

        Args:
            events: that the job has written.
            final_statuses: run name -> status, of the runs that will not be repeated.
            left_out: cells of which nothing is to be done.
        """
        runs = self.runs()
        skipped = events.cells_to_skip(runs, final_statuses) | {*left_out}
        return [r for r in runs if r.cell_id not in skipped and r.name not in final_statuses]

    def runs(self) -> list[Run]:
        """Return the runs it has to do, in order."""
        try:
            runs = [
                Run(block["name"], position, run["cell_id"], run["run_id"])
                for block in self.task["blocks"]
                for position, run in enumerate(block["runs"])
            ]
            is_whole = all(NAME.fullmatch(r.cell_id) and NAME.fullmatch(r.name) for r in runs)
        except (TypeError, KeyError, AttributeError):
            is_whole = False
        if not is_whole:
            path = self.array.folder / "tasks.jsonl"
            raise VitsweepError(
                f"`{path}` is damaged: line {self.index + 1} names no runs of cells."
            )
        return runs


def cells_submitted_since(store: Store, since: float) -> set[str]:
    """Return the cells of the arrays that were submitted after a time, in seconds since 1970."""
    later = (array for array in job_arrays(store) if array.facts["time"] > since)
    return {run.cell_id for array in later for job in array.jobs() for run in job.runs()}


def job_arrays(store: Store) -> list[JobArray]:
    """Return the job arrays of a sweep, oldest first."""
    return [JobArray(path.parent) for path in sorted(store.root.glob("jobs/*/array.json"))]
