"""The live table of a submitted sweep, fed by the events that jobs write."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vitsweep.launchers.progress import Progress
from vitsweep.launchers.slurm.state.jobs import JobArray, read_new_events
from vitsweep.launchers.slurm.state.reconcile import reconcile
from vitsweep.planning.sweep_plan import SweepPlan, cell_labels
from vitsweep.results.record import Status
from vitsweep.results.store import Store

READ_SECONDS = 1.0
POLL_SLURM_SECONDS = 5.0


def watch(store: Store, plan: SweepPlan, watched: Sequence[JobArray], console: Console) -> bool:
    """Show the table until all jobs of the arrays have ended.

    Returns:
        False where the user detached with Ctrl-C.
    """
    num_runs = sum(len(job.runs()) for array in watched for job in array.jobs())
    progress = Progress(console, cell_labels(plan), num_runs)
    try:
        with progress.shown():
            _follow(store, plan, watched, progress)
    except KeyboardInterrupt:
        return False
    return True


def _follow(store: Store, plan: SweepPlan, watched: Sequence[JobArray], progress: Progress) -> None:
    """Read events often, and reconcile less often, until no job is live."""
    reader = _EventReader(plan, progress)
    num_jobs = sum(array.facts["num_jobs"] for array in watched)
    reconciled_at, all_ended = time.monotonic(), False
    while True:
        reader.read(watched)
        had_all_ended, all_ended = all_ended, len(reader.ended_jobs) == num_jobs
        is_due = time.monotonic() > reconciled_at + POLL_SLURM_SECONDS
        if is_due or (all_ended and not had_all_ended):
            if not any(state.is_live for state in reconcile(store, watched)):
                break
            reconciled_at = time.monotonic()
        time.sleep(READ_SECONDS)
    reader.read(watched)


class _EventReader:
    """Reads the event files of jobs from where it stopped the last time, and reports runs.

    Attributes:
        ended_jobs: event files of the jobs that have ended.
    """

    def __init__(self, plan: SweepPlan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._offsets: dict[str, int] = {}
        self.ended_jobs: set[str] = set()

    def read(self, watched: Sequence[JobArray]) -> None:
        """Read new events of all jobs."""
        for array in watched:
            for file in os.scandir(array.folder):
                name = file.name.partition(".jsonl")[0]
                if name.isdigit() and file.stat().st_size > self._offsets.get(file.path, 0):
                    self._read_file(file.path)

    def _read_file(self, path: str) -> None:
        events, self._offsets[path] = read_new_events(Path(path), self._offsets.get(path, 0))
        for event in events:
            kind = event["event"]
            if kind == "job_start":
                self.ended_jobs.discard(path)
            elif kind == "reconciled" or (kind == "job_end" and not event.get("requeued")):
                self.ended_jobs.add(path)
            else:
                self._report_run(event)

    def _report_run(self, event: dict[str, Any]) -> None:
        cell = self._plan.entries.get(event.get("cell_id", ""))
        if cell is None:
            return
        if event["event"] == "run_start":
            self._progress.started(cell)
        elif event["event"] == "run_end":
            self._progress.dropped(-1 if event["will_repeat"] else 0)
            status = Status(event["status"])
            speed = event.get("images_per_second")
            self._progress.reported(cell, status, event.get("reason", ""), speed)
