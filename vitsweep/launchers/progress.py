"""Progress of a command: a line per run, and one of what runs now."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import exp, inf, log
from statistics import fmean, median

from rich.console import Console
from rich.live import Live
from rich.text import Text

from vitsweep.console import can_be_redrawn, notebook_line, periodic_status
from vitsweep.planning.blocks import seconds_beyond_screening
from vitsweep.planning.sweep_plan import PlannedCell
from vitsweep.results.record import RunRecord, Status
from vitsweep.spec.measurement import MIN_BLOCKS
from vitsweep.tables.formatting import count, duration, number, shortened
from vitsweep.tables.speedup import about

LEAST_NAME = 16
"""Characters of the shortest name of a cell."""
BESIDE_SECONDS = 1.0
"""Of a run, outside of its ranks."""
LINE = 80
"""Columns into which a line fits; a name gives way in its middle."""


class Progress:
    """What of a command has run, and how long the rest will take.

    Args:
        console: where progress goes.
        labels: cell id -> what distinguishes it.
        total_runs: runs of this command.
        seconds: budget of this command.
    """

    def __init__(
        self, console: Console, labels: dict[str, str], total_runs: int, seconds: float = inf
    ) -> None:
        self.console = console
        self._labels = labels
        self._done, self._total = 0, total_runs
        self._begin, self._budget = time.monotonic(), seconds
        self._started: dict[str, float] = {}
        self._left: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._setups: dict[str, list[float]] = {}
        self._speeds: dict[tuple[bool, str], dict[str, float]] = {}
        self._show: Callable[[str], None] = partial(
            self.console.print, highlight=False, markup=False
        )

    @property
    def seconds_of_budget_left(self) -> float:
        """What is left of the budget; infinite without one."""
        return self._begin + self._budget - time.monotonic()

    @contextmanager
    def shown(self) -> Iterator["Progress"]:
        """Show what runs until the block is left."""
        if self.console.is_jupyter and not self.console.quiet:
            with notebook_line() as self._show, periodic_status(self._show, self.line, 1.0):
                yield self
        elif can_be_redrawn(self.console):
            running = lambda: Text(self.line())  # noqa: E731
            with Live(get_renderable=running, console=self.console, transient=True):
                yield self
        else:
            with periodic_status(self._show, self.line):
                yield self

    def warming_up(self, entry: PlannedCell) -> None:
        """Say that a cell runs once to warm up the machine, and that what it measures is discarded."""
        self.started(entry)
        self._print("Warm-up of the machine: ", entry.cell_id, " runs for a second, discarded.")

    def warmed_up(self, entry: PlannedCell) -> None:
        """Note that it has run; no ratio is over what it measured."""
        self._started.pop(entry.cell_id, None)

    def started(self, entry: PlannedCell) -> None:
        """Note that a run of this cell begins."""
        self._started[entry.cell_id] = time.monotonic()

    def ended(self, entry: PlannedCell, record: RunRecord) -> None:
        """Note how a run of this cell ended, and from which checkpoint its training went on."""
        if resumed := record.environment.get("resumed"):
            self._print("", entry.cell_id, f": {resumed}")
        speed, seconds = record.metrics.get("images_per_second"), 0.0
        if own := record.environment.get("run_seconds"):
            parts = (record.metrics.get(f"{part}_seconds") or 0.0 for part in ("setup", "compile"))
            self._setups.setdefault(entry.cell_id, []).append(sum(parts))
            beyond = seconds_beyond_screening(entry) if record.is_screening else 0.0
            seconds = own + beyond + BESIDE_SECONDS
        of_run = record.status, record.reason, speed, record.is_screening
        self.reported(entry, *of_run, seconds, record.block)

    def reported(
        self,
        entry: PlannedCell,
        status: Status,
        reason: str,
        speed: float | None,
        is_screening: bool = False,
        seconds: float = 0.0,
        block: str = "",
    ) -> None:
        """Note how a run of this cell ended that another process measured.

        Args:
            entry: its cell.
            status: of the run.
            reason: why it was not measured.
            speed: images per second.
            is_screening: whether it is a screening run, whose ratio is to others.
            seconds: that the next run of the cell will take; 0 for as long as this one took.
            block: of the run; a ratio is taken within it.
        """
        self._done += 1
        self._total = max(self._total, self._done)  # a killed run is repeated
        cell_id = entry.cell_id
        self._left[cell_id] -= 1
        took = time.monotonic() - self._started.pop(cell_id, time.monotonic())
        self._seconds[cell_id] = seconds or took
        outcome, said = f"{status}: {reason}", ""
        if status == Status.measured and speed:
            outcome = f"{number(speed)} img/s"
            self._speeds.setdefault((is_screening, cell_id), {})[block] = speed
            shown = self._ratio(entry, speed, is_screening=is_screening)
            has_none = is_screening or entry.spec.measurement.blocks < MIN_BLOCKS
            said = f"{about(shown)} {'(no interval)' if has_none else 'so far'}" if shown else ""
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
        """Return the state in one line."""
        running, now = list(self._started.items()), time.monotonic()
        if not running:
            return f"{self._title()}; no cell runs at the moment"
        (cell, began), *others = running
        after = f" runs for {now - began:.0f} s"
        if others:
            after = f" and {count(len(others), 'other')} run"
        return self._named(f"{self._title()}; ", cell, after)

    def _ratio(self, entry: PlannedCell, speed: float, *, is_screening: bool) -> float:
        """Return the mean ratio to the baseline over the blocks of this command; 0 without any."""
        cell, base = entry.cell_id, entry.baseline_id or ""
        own, other = (self._speeds.get((is_screening, c), {}) for c in (cell, base))
        both = [block for block in own if block in other] if cell != base else []
        return exp(fmean(log(own[b] / other[b]) for b in both)) if both else 0.0

    def _title(self) -> str:
        if self._budget < inf:
            left = duration(max(self.seconds_of_budget_left, 0.0))
            return f"{self.reached}, at most {left} left"
        left = ", the first starts all processes"
        if self._done:
            seconds = round(self._seconds_left())
            left = f", about {duration(seconds)} left" if seconds > 0 else ""
        return f"{self.reached}{left}"

    @property
    def reached(self) -> str:
        """How many runs have ended, and of how many where that is known: `9 of 23 runs`."""
        if self._budget < inf:
            return count(self._done, "run")
        return f"{self._done} of {self._total} runs"

    def _seconds_left(self) -> float:
        """Estimate the rest from the latest run of each cell; of one that has not run, from their median.

        The first run of a cell proves and compiles it: its next one is set up like the fastest so far.
        """
        now, left = time.monotonic(), +self._left
        if left.total() != self._total - self._done:
            return (now - self._begin) / self._done * (self._total - self._done)
        least = min((s for setups in self._setups.values() for s in setups), default=0.0)
        once = {cell: setups[0] for cell, setups in self._setups.items() if len(setups) == 1}
        known = {c: s - (once.get(c, least) - least) for c, s in self._seconds.items()}
        usual = median(known.values())
        seconds = {cell: known.get(cell, usual) for cell in left}
        running = (min(now - t, seconds.get(c, 0.0)) for c, t in list(self._started.items()))
        return sum(n * seconds[cell] for cell, n in left.items()) - sum(running)
