"""The hand that writes the life of a job: its lead's, and nobody else's while the job lives."""

import time
from typing import Any

from vitsweep.launchers.slurm.state.job_events import Run
from vitsweep.launchers.slurm.state.job_files import Element
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import append_line

BEAT_SECONDS = 30.0


class JobEventWriter:
    """Writes what happens, and knows which runs need no further attempt.

    Args:
        element: the job.
        restart: how often Slurm has started it before.

    Attributes:
        earlier: what earlier starts of the job wrote.
        ended: run -> status, of the runs that have ended for good.
        over: cells that ended otherwise; they would end so in the next block too.
    """

    def __init__(self, element: Element, restart: int) -> None:
        self.element, self.restart = element, restart
        self.earlier = element.life()
        self.ended = self.earlier.ended()
        self.over = {run.cell_id for run in element.runs() if self._otherwise(run)}
        self._beat_at = 0.0

    def _otherwise(self, run: Run) -> bool:
        return self.ended.get(run.name, Status.measured) != Status.measured

    @property
    def left(self) -> list[Run]:
        """Runs that are still to be done, in order."""
        runs = self.element.runs()
        return [r for r in runs if r.name not in self.ended and r.cell_id not in self.over]

    @property
    def all_measured(self) -> bool:
        """Whether every run that ended was measured."""
        return set(self.ended.values()) <= {str(Status.measured)}

    @property
    def replaced_by(self) -> int | None:
        """A later start of the same job: Slurm believes this one dead."""
        last = self.element.life().last_start
        return last["restart"] if last and last["restart"] > self.restart else None

    def note(self, event: str, **facts: Any) -> None:
        """Write a line."""
        line = {"event": event, "time": time.time(), "restart": self.restart}
        append_line(self.element.life_path, line | facts)
        self._beat_at = time.monotonic()

    def beat(self) -> None:
        """Show that the job lives, where nothing else has for a while."""
        if time.monotonic() > self._beat_at + BEAT_SECONDS:
            self.note("beat")

    def run_ends(
        self, run: Run, record: RunRecord, again: bool = False, saved_step: int | None = None
    ) -> None:
        """Write how a run ended; with `again` a later start of the job repeats it, or goes on."""
        if not again:
            self.ended[run.name] = str(record.status)
            self.over |= {run.cell_id} if record.status != Status.measured else set()
        self.note(
            "run_end",
            run=run.name,
            cell_id=run.cell_id,
            run_id=record.run_id,
            status=str(record.status),
            reason=record.reason,
            images_per_second=record.metrics.get("images_per_second"),
            again=again,
            saved_step=saved_step,
        )
