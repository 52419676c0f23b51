"""Writes the events of a job: the coordinator does, and nobody else while the job is alive."""

import time
from collections.abc import Collection
from typing import Any

from vitsweep.launchers.slurm.state.job_events import Run
from vitsweep.launchers.slurm.state.job_files import ArrayJob
from vitsweep.results.files import append_line
from vitsweep.results.record import RunRecord, Status

HEARTBEAT_SECONDS = 30.0


class JobEventWriter:
    """Writes events, and knows which runs need no further attempt.

    Args:
        job: the job.
        restart: how often Slurm has started it before.

    Attributes:
        earlier: events of earlier starts of the job.
        final_statuses: run -> status, of the runs that will not be repeated.
    """

    def __init__(self, job: ArrayJob, restart: int) -> None:
        self.job, self.restart = job, restart
        self.earlier = job.events()
        self._taken_over: set[str] = set()
        self.final_statuses = self.earlier.final_statuses()
        self._written_at = 0.0

    @property
    def remaining_runs(self) -> list[Run]:
        """Runs that are still to be done, in order."""
        runs = self.job.runs()
        skipped_cells = self.earlier.cells_to_skip(runs, self.final_statuses) | self._taken_over
        return [
            run
            for run in runs
            if run.name not in self.final_statuses and run.cell_id not in skipped_cells
        ]

    @property
    def all_measured(self) -> bool:
        """Whether every run that ended was measured."""
        return set(self.final_statuses.values()) <= {str(Status.measured)}

    @property
    def newer_restart(self) -> int | None:
        """Number of a later start of the same job, which means that Slurm takes this one for dead."""
        last = self.job.events().last_start
        return last["restart"] if last and last["restart"] > self.restart else None

    def write(self, event: str, **facts: Any) -> None:
        """Append an event."""
        line = {"event": event, "time": time.time(), "restart": self.restart}
        append_line(self.job.events_path, line | facts)
        self._written_at = time.monotonic()

    def heartbeat(self) -> None:
        """Show that the job is alive, where no other event has for a while."""
        if time.monotonic() > self._written_at + HEARTBEAT_SECONDS:
            self.write("heartbeat")

    def leave_to_other_jobs(self, cells: Collection[str]) -> None:
        """Do no further run of some cells, neither in this start of the job nor in a later one."""
        self._taken_over |= set(cells)
        self.write("taken_over", cells=sorted(cells))

    def run_ended(
        self, run: Run, record: RunRecord, will_repeat: bool = False, saved_step: int | None = None
    ) -> None:
        """Write how an attempt of a run ended.

        Args:
            run: the run.
            record: of the attempt.
            will_repeat: whether a later start of the job repeats it, or continues its training.
            saved_step: steps after which its training is saved, or None.
        """
        if not will_repeat:
            self.final_statuses[run.name] = str(record.status)
        self.write(
            "run_end",
            run=run.name,
            cell_id=run.cell_id,
            run_id=record.run_id,
            status=str(record.status),
            reason=record.reason,
            images_per_second=record.metrics.get("images_per_second"),
            will_repeat=will_repeat,
            saved_step=saved_step,
        )
