"""Progress of a command: a live table in a terminal, one line per run elsewhere."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from rich.console import Console
from rich.live import Live
from rich.table import Table

from vitsweep.console import can_be_redrawn, saying
from vitsweep.planning.sweep_plan import PlannedCell
from vitsweep.results.record import RunRecord, Status
from vitsweep.tables.formatting import number

WAITING, RUNNING = "waiting", "running"
MAX_ROWS = 30
MEDIAN = "median img/s"
"""The result table's `unadjusted_images_per_second`, over the runs of this command so far."""
CAPTION = "Of this command's runs; the result table pairs a cell with its baseline in each block."
MOST_NAMED = 3
"""Running cells that a line names."""


class Progress:
    """State of every cell, and how long the rest will take.

    Args:
        console: where to show it.
        labels: cell id -> what tells it apart.
        total_runs: runs of this command.
    """

    def __init__(self, console: Console, labels: dict[str, str], total_runs: int) -> None:
        self.console = console
        self._labels = labels
        self._states = dict.fromkeys(labels, WAITING)
        self._speeds: dict[str, list[float]] = {cell: [] for cell in labels}
        self._done, self._total = 0, total_runs
        self._begin = time.monotonic()
        self._started: dict[str, float] = {}
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show the table until the block is left."""
        if not can_be_redrawn(self.console):
            with saying(self.console, self.line):
                yield self
            return
        with Live(get_renderable=self._table, console=self.console, refresh_per_second=4) as live:
            self._live = live
            yield self
        self._live = None

    def warming_up(self, entry: PlannedCell) -> None:
        """Say that a cell runs once to warm up the machine, and that what it measures is discarded."""
        self.started(entry)
        self.console.print(
            f"Warm-up of the machine: {self._labels[entry.cell_id]} runs once, discarded.",
            highlight=False,
            markup=False,
        )

    def started(self, entry: PlannedCell) -> None:
        """Note that a run of this cell begins."""
        self._states[entry.cell_id] = RUNNING
        self._started[entry.cell_id] = time.monotonic()

    def ended(self, entry: PlannedCell, record: RunRecord) -> None:
        """Note how a run of this cell ended, and from which checkpoint its training went on."""
        if resumed := record.environment.get("resumed"):
            label = self._labels[entry.cell_id]
            self.console.print(f"{label}: {resumed}", highlight=False, markup=False)
        self.reported(entry, record.status, record.reason, record.metrics.get("images_per_second"))

    def reported(
        self, entry: PlannedCell, status: Status, reason: str, speed: float | None
    ) -> None:
        """Note how a run of this cell ended that another process measured.

        Args:
            entry: its cell.
            status: of the run.
            reason: why it was not measured.
            speed: images per second.
        """
        self._done += 1
        self._states[entry.cell_id] = str(status)
        if status == Status.measured and speed:
            self._speeds[entry.cell_id].append(speed)
        if self._live is None:
            outcome = f"{number(speed)} img/s" if speed else f"{status}: {reason}"
            self.console.print(
                f"[{self._done}/{self._total}] {self._labels[entry.cell_id]}: {outcome}",
                highlight=False, markup=False,
            )  # fmt: skip

    def expects(self, runs: int) -> None:
        """Set how many runs are still to come, as far as is known now."""
        self._total = self._done + runs

    def dropped(self, runs: int) -> None:
        """Take away runs that are not needed, because their cell cannot be measured."""
        self._total -= runs

    def line(self) -> str:
        """Return the state in one line, for where no table can be drawn."""
        running = [cell for cell, state in list(self._states.items()) if state == RUNNING]
        now = time.monotonic()
        cells = [
            f"{self._labels[cell]} runs for {now - self._started[cell]:.0f} s"
            for cell in running[:MOST_NAMED]
        ]
        more = [f"{len(running) - MOST_NAMED} more run"] if len(running) > MOST_NAMED else []
        return "; ".join([self._title(), *(cells or ["no cell runs at the moment"]), *more])

    def _table(self) -> Table:
        table = Table(
            title=self._title(), title_justify="left", caption=CAPTION, caption_justify="left"
        )
        for column in ("cell", "state", "runs"):
            table.add_column(column)
        table.add_column(MEDIAN, justify="right")
        busy = sorted(self._states, key=lambda cell: self._states[cell] != RUNNING)
        for cell in busy[:MAX_ROWS]:
            speeds = self._speeds[cell]
            speed = number(median(speeds)) if speeds else ""
            table.add_row(self._labels[cell], self._states[cell], str(len(speeds)), speed)
        return table

    def _title(self) -> str:
        left = ""
        if self._done:
            per_run = (time.monotonic() - self._begin) / self._done
            left = f", about {_duration(per_run * (self._total - self._done))} left"
        return f"{self._done} of {self._total} runs{left}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"
