"""The live table of a submitted sweep, fed by the events that jobs write."""

import os
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console

from vitsweep.files import SweepGoneError
from vitsweep.launchers.progress import Progress
from vitsweep.launchers.slurm.state.jobs import ArrayJob, JobArray, read_new_events
from vitsweep.launchers.slurm.state.poll import REFRESH_SECONDS, PollTimes
from vitsweep.launchers.slurm.state.reconcile import reconcile, wait_for_records
from vitsweep.launchers.slurm.state.status import cancel_waiting
from vitsweep.planning.sweep_plan import SweepPlan, cell_labels
from vitsweep.results.record import LOOK, Status
from vitsweep.results.store import Store


def watch(
    store: Store,
    plan: SweepPlan,
    watched: Sequence[JobArray],
    console: Console,
    deadline: float = inf,
) -> bool:
    """Show the table until all jobs of the arrays have ended.

    Args:
        store: of the sweep.
        plan: its cells.
        watched: the arrays.
        console: where to show it.
        deadline: of `time.monotonic`; jobs that wait in the queue then are cancelled.

    Returns:
        False where the user detached with Ctrl-C.
    """
    num_runs = sum(len(job.runs()) for array in watched for job in array.jobs())
    progress = Progress(console, cell_labels(plan), num_runs, deadline - time.monotonic())
    try:
        with progress.shown():
            _follow(store, plan, watched, progress, deadline)
    except KeyboardInterrupt:
        return False
    return True


def _follow(
    store: Store,
    plan: SweepPlan,
    watched: Sequence[JobArray],
    progress: Progress,
    deadline: float,
) -> None:
    """Read events often, and reconcile less often, until no job is live."""
    reader = _EventReader(plan, progress)
    num_jobs = sum(array.facts["num_jobs"] for array in watched)
    times, all_ended, is_late = PollTimes(), False, False
    times.asked([])
    while True:
        reader.read(watched)
        had_all_ended, all_ended = all_ended, len(reader.ended_jobs) == num_jobs
        was_late, is_late = is_late, time.monotonic() > deadline
        if times.is_due() or (all_ended and not had_all_ended) or (is_late and not was_late):
            times.asked(states := reconcile(store, watched))
            if not any(state.is_live for state in states):
                break
            if is_late:
                cancel_waiting(states)
        time.sleep(REFRESH_SECONDS)
    reader.read(watched)
    wait_for_records(store, states, progress.console)


class _EventReader:
    """Reads the event files of jobs from where it stopped the last time, and reports runs.

    Attributes:
        ended_jobs: event files of the jobs that have ended.
    """

    def __init__(self, plan: SweepPlan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._offsets: dict[str, int] = {}
        self._left_out: dict[str, int] = {}
        self.ended_jobs: set[str] = set()

    def read(self, watched: Sequence[JobArray]) -> None:
        """Read new events of all jobs."""
        for array in watched:
            if not array.folder.is_dir():
                raise SweepGoneError(array.folder.parents[1])
            for file in os.scandir(array.folder):
                name = file.name.partition(".jsonl")[0]
                if name.isdigit() and file.stat().st_size > self._offsets.get(file.path, 0):
                    if self._read_file(file.path):
                        self._drop_slow_cells(array.job(int(name)))

    def _drop_slow_cells(self, job: ArrayJob) -> None:
        """Take away the runs of cells that stay at their look."""
        runs, before = job.num_left_out(job.events()), self._left_out.get(job.slurm_id, 0)
        self._progress.dropped(runs - before)
        self._left_out[job.slurm_id] = runs

    def _read_file(self, path: str) -> bool:
        """Report what is new; True where a look has ended."""
        events, self._offsets[path] = read_new_events(Path(path), self._offsets.get(path, 0))
        for event in events:
            kind = event["event"]
            if kind == "job_start":
                self.ended_jobs.discard(path)
            elif kind == "reconciled" or (kind == "job_end" and not event.get("requeued")):
                self.ended_jobs.add(path)
            else:
                self._report_run(event)
        return any(event.get("purpose") == LOOK for event in events)

    def _report_run(self, event: dict[str, Any]) -> None:
        cell = self._plan.entries.get(event.get("cell_id", ""))
        if cell is None:
            return
        if event["event"] == "run_start":
            self._progress.started(cell)
        elif event["event"] == "run_end":
            self._progress.dropped(-1 if event["will_repeat"] else 0)
            status = Status(event["status"])
            speed, is_look = event.get("images_per_second"), event.get("purpose") == LOOK
            self._progress.reported(cell, status, event.get("reason", ""), speed, is_look)
