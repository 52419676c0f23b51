"""The live table of a submitted sweep, fed by what the jobs write."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from vitsweep.launchers.progress import Progress, labels
from vitsweep.launchers.slurm.state.job_events import read_events
from vitsweep.launchers.slurm.state.job_files import Array
from vitsweep.launchers.slurm.state.reconcile import reconcile
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.record import Status
from vitsweep.results.store import Store

LOOK_SECONDS = 1.0
ASK_SECONDS = 5.0


def watch(store: Store, plan: SweepPlan, watched: Sequence[Array], console: Console) -> bool:
    """Show the table until all jobs have ended; False where the user detached."""
    total = sum(len(e.runs()) for array in watched for e in array.elements())
    progress = Progress(console, labels(plan), total)
    try:
        with progress.shown():
            _follow(store, plan, watched, progress)
    except KeyboardInterrupt:
        return False
    return True


def _follow(store: Store, plan: SweepPlan, watched: Sequence[Array], progress: Progress) -> None:
    reader = _Reader(plan, progress)
    jobs = sum(array.facts["elements"] for array in watched)
    asked_at = time.monotonic()
    while len(reader.ended) < jobs:
        time.sleep(LOOK_SECONDS)
        reader.read(watched)
        if time.monotonic() > asked_at + ASK_SECONDS:
            if not any(seen.live for seen in reconcile(store, watched)):
                break
            asked_at = time.monotonic()
    reader.read(watched)
    reconcile(store, watched)


class _Reader:
    """Reads on in the lives of jobs and tells of runs.

    Attributes:
        ended: lives of the jobs that have ended.
    """

    def __init__(self, plan: SweepPlan, progress: Progress) -> None:
        self._roster, self._progress = plan, progress
        self._offsets: dict[str, int] = {}
        self.ended: set[str] = set()

    def read(self, watched: Sequence[Array]) -> None:
        """Read what is new."""
        for array in watched:
            for entry in os.scandir(array.folder):
                name = entry.name.partition(".jsonl")[0]
                if name.isdigit() and entry.stat().st_size > self._offsets.get(entry.path, 0):
                    self._read_on(Path(entry.path))

    def _read_on(self, path: Path) -> None:
        name = str(path)
        events, self._offsets[name] = read_events(path, self._offsets.get(name, 0))
        for event in events:
            if event["event"] == "job_start":
                self.ended.discard(name)
            elif event["event"] == "closed" or (
                event["event"] == "job_end" and not event.get("requeued")
            ):
                self.ended.add(name)
            else:
                self._tell(event)

    def _tell(self, event: dict[str, Any]) -> None:
        entry = self._roster.entries.get(event.get("cell_id", ""))
        if entry is None:
            return
        if event["event"] == "run_start":
            self._progress.started(entry)
        elif event["event"] == "run_end":
            self._progress.dropped(-1 if event["again"] else 0)
            status = Status(event["status"])
            speed = event.get("images_per_second")
            self._progress.told(entry, status, event.get("reason", ""), speed)
