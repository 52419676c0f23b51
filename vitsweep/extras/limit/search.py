"""The largest value of a key that still trains, found by bisection between runs out of memory.

`sweep.limit.key=data.num_frames` searches for the limit of each cell of the grid. In each round every
cell tries one value, through whichever launcher runs them. A value that was tried is a cell of the
sweep like any other: its record is kept, and the same command continues the search.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitsweep.api.functions import measured, rows_of
from vitsweep.api.session import Session
from vitsweep.composition.composer import ComposedCell, Composer
from vitsweep.composition.hydra import key_of, value_override
from vitsweep.composition.sweep_settings import LimitSettings
from vitsweep.errors import BadValueError, ExitCode
from vitsweep.extras.limit.shown import show
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.report.views import collect
from vitsweep.results.record import Status

Row = Mapping[str, Any]
RunRound = Callable[[int, list[ComposedCell]], Sequence[Row]]
"""Takes the number of a round and the cells to try, returns the row of each."""


@dataclass
class Search:
    """The bounds found so far for one cell of the grid.

    Attributes:
        fits: the largest value that was measured; 0 where none was.
        fails: the smallest that ran out of memory, or None.
        failure: status and reason of a value that neither was measured nor ran out of memory, so
            that it says nothing about the limit and the search cannot continue; else empty.
    """

    fits: int = 0
    fails: int | None = None
    failure: str = ""

    def next(self, limit: LimitSettings) -> int | None:
        """Return the value to try next; None where the limit is found, or the search has failed."""
        if self.failure:
            return None
        if self.fails is None:
            wanted = limit.round_down(2 * self.fits or max(limit.first, limit.step))
            wanted = wanted if limit.most is None else min(wanted, limit.round_down(limit.most))
        elif self.fails - self.fits <= max(limit.step, limit.within * self.fits):
            return None
        else:
            wanted = max(limit.round_down((self.fits + self.fails) / 2), self.fits + limit.step)
        return wanted if wanted > self.fits else None

    def learn(self, value: int, row: Row) -> None:
        """Update the bounds by the row of a value that was tried."""
        if row["status"] == Status.measured:
            self.fits = value
        elif row["status"] == Status.out_of_memory:
            self.fails = value
        else:
            self.failure = f"{row['status']}: {row.get('reason') or ''}"


@dataclass
class Searches:
    """The searches of all cells of a grid.

    Args:
        cells: of the grid, without the key.
        limit: settings of the search.
        composer: composes the cells that are tried.
    """

    cells: Sequence[ComposedCell]
    limit: LimitSettings
    composer: Composer
    _searches: dict[str, Search] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> "Searches":
        """Return the searches for the limits of a session's cells.

        Raises:
            BadValueError: the key is swept as well, there is a baseline, or no value may be tried.
        """
        cells, limit = session.cells, session.settings.limit
        fixed = [text for cell in cells for text in cell.overrides if key_of(text) == limit.key]
        if fixed:
            raise BadValueError(
                f"`{fixed[0]}` sets the key whose limit `sweep.limit` searches for: leave it out, or set "
                "`sweep.limit.key=null` to measure this value alone."
            )
        if any(cell.tree["sweep"].get("baseline") is not None for cell in cells):
            raise BadValueError(
                "`sweep.limit` searches for what fits and compares no speeds, so that a baseline would "
                "run for nothing: add `sweep.baseline=null`."
            )
        if limit.most is not None and limit.step > limit.most:
            raise BadValueError(
                f"`sweep.limit.step={limit.step}` is more than `sweep.limit.most={limit.most}`, so that no "
                "value may be tried: use less."
            )
        return cls(cells, limit, session.composer)

    @property
    def key(self) -> str:
        """The key whose limits are searched for."""
        assert self.limit.key is not None, "only settings with a key are searched"
        return self.limit.key

    def run(self, run_round: RunRound) -> list[Search]:
        """Search until every limit is found; return the searches in the order of the cells."""
        self._searches = {cell.key: Search() for cell in self.cells}
        number = 0
        while True:
            wanted = [(cell, self._searches[cell.key].next(self.limit)) for cell in self.cells]
            probes = [(cell, value) for cell, value in wanted if value is not None]
            if not probes:
                return list(self._searches.values())
            number += 1
            tried = [self._with_value(cell, value) for cell, value in probes]
            rows = run_round(number, tried)
            for (cell, value), row in zip(probes, rows, strict=True):
                self._searches[cell.key].learn(value, row)

    def first(self) -> list[ComposedCell]:
        """Return the cells of the first round."""
        value = Search().next(self.limit) or self.limit.step
        return [self._with_value(cell, value) for cell in self.cells]

    def _with_value(self, cell: ComposedCell, value: int) -> ComposedCell:
        return self.composer.compose([*cell.overrides, value_override(self.key, value)])

    def measure(self, session: Session) -> list[Search]:
        """Search with the launcher of a session.

        Raises:
            BadValueError: two cells of the grid are the same one.
        """

        def run_round(number: int, probed: list[ComposedCell]) -> Sequence[Row]:
            values = ", ".join(cell.overrides[-1].partition("=")[2] for cell in probed)
            session.console.print(
                f"Round {number} of the search for the largest `{self.key}`: {values}"
            )
            plan = (
                session.plan if number == 1 else plan_of(probed, session.machine, session.composer)
            )
            with measured(session, plan) as result:
                rows = rows_of(collect(result.store).cells, result.plan)
            if len(rows) != len(probed):
                raise BadValueError(
                    f"{len(probed) - len(rows)} cells of the grid are the same as others; `sweep.limit` "
                    "needs each once: leave out what changes nothing."
                )
            return rows

        return self.run(run_round)

    def finish(self, session: Session) -> ExitCode:
        """Search, and show the largest value that each cell could train with; return the exit code."""
        found = self.measure(session)
        show(session)
        ended = all(not search.failure for search in found)
        return ExitCode.ok if ended else ExitCode.not_all_measured
