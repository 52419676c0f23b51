"""Progress of a command: a live table in a terminal, one line per run elsewhere."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import exp, inf, log
from statistics import fmean, median

from rich.console import Console
from rich.live import Live
from rich.table import Table

from vitsweep.console import (
    can_be_redrawn,
    notebook_line,
    periodic_status,
)
from vitsweep.planning.blocks import least_seconds_beyond_look
from vitsweep.planning.sweep_plan import PlannedCell
from vitsweep.results.record import RunRecord, Status
from vitsweep.spec.measurement import LONGER
from vitsweep.tables.formatting import count, duration, number, ratio, shortened
from vitsweep.tables.speedup import about
from vitsweep.tables.stats import Claim

WAITING, RUNNING = "waiting", "running"
MAX_ROWS = 30
LEAST_NAME, OTHER_COLUMNS = 16, 64
"""Characters of the shortest name of a cell, and of all else in a row."""
MEDIAN = "median img/s"
"""The result table's `unadjusted_images_per_second`, over the runs of this command so far."""
SO_FAR = "ratio"
"""The result table's `speedup`, over the blocks of this command so far; of looks alone, in brackets."""
CAPTION = "Ratios: over the blocks of this command; with 0 runs, of one look."
BESIDE_SECONDS = 1.0
"""Of a run, outside of its ranks."""
NEEDS_LONGER = f"unsteady steps: its runs last {LONGER}x"
LINE = 80
"""Columns into which a line fits; a name gives way in its middle."""


class Progress:
    """State of every cell, and how long the rest will take.

    Args:
        console: where progress goes.
        labels: cell id -> what tells it apart.
        total_runs: runs of this command.
        seconds: budget of this command.
    """

    def __init__(
        self, console: Console, labels: dict[str, str], total_runs: int, seconds: float = inf
    ) -> None:
        self.console = console
        self._labels = labels
        self._states = dict.fromkeys(labels, WAITING)
        self._speeds: dict[str, list[float]] = {cell: [] for cell in labels}
        self._done, self._total = 0, total_runs
        self._begin, self._budget = time.monotonic(), seconds
        self._started: dict[str, float] = {}
        self._left: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._per_block: dict[tuple[bool, str], dict[str, float]] = {}
        self._baselines: dict[str, str] = {}
        self._references: dict[str, float] = {}
        self._live: Live | None = None
        self._show: Callable[[str], None] = partial(
            self.console.print, highlight=False, markup=False
        )

    @property
    def seconds_of_budget_left(self) -> float:
        """What is left of the budget; infinite without one."""
        return self._begin + self._budget - time.monotonic()

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show the table until the block is left."""
        if self.console.is_jupyter and not self.console.quiet:
            with notebook_line() as self._show, periodic_status(self._show, self.line, 1.0):
                yield self
            return
        if not can_be_redrawn(self.console):
            with periodic_status(self._show, self.line):
                yield self
            return
        with Live(get_renderable=self._table, console=self.console, refresh_per_second=4) as live:
            self._live = live
            yield self
        self._live = None

    def warming_up(self, entry: PlannedCell) -> None:
        """Say that a cell runs once to warm up the machine, and that what it measures is discarded."""
        self.started(entry)
        self._print("Warm-up of the machine: ", entry.cell_id, " runs for a second, discarded.")

    def warmed_up(self, entry: PlannedCell, record: RunRecord) -> None:
        """Note how fast the baseline was: the first ratios are over it, as long as no block has one."""
        self._states[entry.cell_id] = WAITING
        self._references[entry.cell_id] = record.metrics.get("images_per_second") or 0.0

    def started(self, entry: PlannedCell) -> None:
        """Note that a run of this cell begins."""
        self._states[entry.cell_id] = RUNNING
        self._started[entry.cell_id] = time.monotonic()

    def ended(self, entry: PlannedCell, record: RunRecord) -> None:
        """Note how a run of this cell ended, and from which checkpoint its training went on."""
        if resumed := record.environment.get("resumed"):
            self._print("", entry.cell_id, f": {resumed}")
        is_look = record.is_look
        speed, seconds = record.metrics.get("images_per_second"), 0.0
        if own := record.environment.get("run_seconds"):
            beyond = least_seconds_beyond_look(entry) if is_look else 0.0
            seconds = own + beyond + BESIDE_SECONDS
        said = NEEDS_LONGER if is_look and record.spec.get("measurement.min_seconds") else ""
        self.reported(
            entry, record.status, record.reason, speed, is_look, seconds, record.block, said
        )

    def reported(
        self,
        entry: PlannedCell,
        status: Status,
        reason: str,
        speed: float | None,
        is_look: bool = False,
        seconds: float = 0.0,
        block: str = "",
        said: str = "",
    ) -> None:
        """Note how a run of this cell ended that another process measured.

        Args:
            entry: its cell.
            status: of the run.
            reason: why it was not measured.
            speed: images per second.
            is_look: the run is a look: it counts for no median, and its ratio is shown at once.
            seconds: that the next run of the cell will take; 0 for as long as this one took.
            block: of the run; a ratio is taken within it.
            said: what a look shows, where that is not its ratio.
        """
        self._done += 1
        cell_id, text = entry.cell_id, ""
        self._left[cell_id] -= 1
        took = time.monotonic() - self._started.pop(cell_id, time.monotonic())
        self._seconds[cell_id] = seconds or took
        self._baselines[cell_id] = entry.baseline_id or ""
        if status == Status.measured and speed:
            self._per_block.setdefault((is_look, cell_id), {})[block] = speed
            if not is_look:
                self._speeds[cell_id].append(speed)
                said = self._first_ratio(cell_id)
            else:
                look, text = self._ratio(cell_id, is_look=True), str(Claim.one_look)
                said = said or (f"{about(look)} (no interval)" if look else text)
        self._states[cell_id] = text or str(status)
        if self._live is None:
            outcome = f"{number(speed)} img/s" if speed else f"{status}: {reason}"
            outcome = ", ".join(filter(None, (outcome, said)))
            self._print(f"{self._place()} ", cell_id, f": {outcome}")

    def _print(self, before: str, cell: str, after: str) -> None:
        self._show(self._named(before, cell, after))

    def _named(self, before: str, cell: str, after: str) -> str:
        room = max(LINE - len(before) - len(after), LEAST_NAME)
        return f"{before}{shortened(self._labels[cell], room)}{after}"

    def _place(self) -> str:
        return f"[{self._done}]" if self._budget < inf else f"[{self._done}/{self._total}]"

    def expects(self, runs: int | Mapping[str, int]) -> None:
        """Set how many runs are still to come, of each cell or in all, as far as is known now."""
        self._left = Counter(runs if isinstance(runs, Mapping) else {})
        self._total = self._done + (runs if isinstance(runs, int) else self._left.total())

    def dropped(self, runs: int) -> None:
        """Take away runs that are not needed, because their cell cannot be measured."""
        self._total -= runs

    def line(self) -> str:
        """Return the state in one line, for where no table can be drawn."""
        running = [cell for cell, state in list(self._states.items()) if state == RUNNING]
        now = time.monotonic()
        if not running:
            return f"{self._title()}; no cell runs at the moment"
        cell, more = running[0], f"; {len(running) - 1} more run" if len(running) > 1 else ""
        after = f" runs for {now - self._started[cell]:.0f} s{more}"
        return self._named(f"{self._title()}; ", cell, after)

    def _table(self) -> Table:
        table = Table(
            title=self._title(), title_justify="left", caption=CAPTION, caption_justify="left"
        )
        # long names give way, never what was measured
        name_width = max(LEAST_NAME, self.console.width - OTHER_COLUMNS)
        table.add_column("cell", no_wrap=True)
        table.add_column("state")
        for column in ("runs", MEDIAN, SO_FAR):
            table.add_column(column, justify="right", no_wrap=True)
        busy = sorted(self._states, key=lambda cell: self._states[cell] != RUNNING)
        for cell in busy[:MAX_ROWS]:
            speeds = self._speeds[cell]
            shown = self._ratio(cell) or self._ratio(cell, is_look=True)
            table.add_row(
                shortened(self._labels[cell], name_width),
                self._states[cell],
                str(len(speeds)),
                number(median(speeds)) if speeds else "",
                ratio(shown or None),
            )
        return table

    def _ratio(self, cell: str, *, is_look: bool = False) -> float:
        """Return the mean ratio over the blocks of a cell and its baseline; 0 without any."""
        base = self._baselines.get(cell, "")
        own, other = (self._per_block.get((is_look, c), {}) for c in (cell, base))
        both = [block for block in own if block in other] if cell != base else []
        return exp(fmean(log(own[b] / other[b]) for b in both)) if both else 0.0

    def _first_ratio(self, cell: str) -> str:
        """Say how the first run of a cell compares with its baseline, after a warm-up of that."""
        base, own = self._baselines[cell], self._speeds[cell]
        reference = self._references.get(base)
        if not reference or cell == base or len(own) > 1:
            return ""
        return f"{about(self._ratio(cell) or own[0] / reference)} (no interval)"

    def _title(self) -> str:
        if self._budget < inf:
            left = duration(max(self.seconds_of_budget_left, 0.0))
            return f"{count(self._done, 'run')}, at most {left} left"
        left = ", the first starts all processes"
        if self._done:
            left = f", about {duration(self._seconds_left())} left"
        return f"{self._done} of {self._total} runs{left}"

    def _seconds_left(self) -> float:
        """Estimate the rest from the latest run of each cell; of one that has not run, from their median."""
        now, left = time.monotonic(), +self._left
        if left.total() != self._total - self._done:
            return (now - self._begin) / self._done * (self._total - self._done)
        usual = median(self._seconds.values())
        seconds = {cell: self._seconds.get(cell, usual) for cell in left}
        running = (min(now - t, seconds.get(c, 0.0)) for c, t in list(self._started.items()))
        return sum(n * seconds[cell] for cell, n in left.items()) - sum(running)
