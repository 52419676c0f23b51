"""Measuring the cells of a session: what the command line and `vitsweep.sweep` both call."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pandas import DataFrame

from vitsweep.api.session import Session
from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.errors import BadValueError, SweepStopped
from vitsweep.launchers.base import LaunchResult
from vitsweep.planning.limit_search import Search, Searches, limit_of
from vitsweep.planning.refused import all_refused
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.trackers import check_tracker

Row = Mapping[str, Any]

SUBMITTED = "submitted"
"""Instead of a status, where a launcher returns before its cells have run."""


@contextmanager
def measured(session: Session, cells: Sequence[ComposedCell] = ()) -> Iterator[LaunchResult]:
    """Measure what is missing of the cells, or of some of them.

    The result is read within the `with` block, while the sweep is locked (see `launchers.base`).

    Raises:
        VitsweepError: something that was asked for cannot be done; nothing has run.
        SweepStopped: when the block ends, if the user stopped the sweep or detached from its jobs.
    """
    if session.settings.search == "race":
        require_racing(session.launcher)
    with session.launcher.launch_cells(session.request(cells)) as result:
        yield result
    if result.interrupted:
        if not result.submitted:
            session.console.print("Stopped. What was measured is kept; the same command continues.")
        raise SweepStopped


def require_racing(launcher: object) -> None:
    """Refuse `sweep.search=race` with a launcher that would measure the whole grid.

    Raises:
        BadValueError: it cannot choose blocks from the runs of those before.
    """
    if not getattr(launcher, "can_race", False):
        raise BadValueError(
            f"`sweep.search=race` does not work with {type(launcher).__name__}, which measures all cells "
            "it is given: use `hydra/launcher=local` or `slurm`, with vitsweep's own sweeper."
        )


def collected(result: LaunchResult) -> DataFrame:
    """Write the views of the sweep; return one row per cell of the plan, baselines included.

    Raises:
        ImpossibleCellError: every cell is refused.
    """
    from vitsweep.report.views import collect

    table = collect(result.store)
    if not result.plan.runnable:
        raise all_refused(result.plan)
    return table[table["cell_id"].isin(result.plan.entries)]


def rows_of(cells: DataFrame, plan: SweepPlan) -> list[Row]:
    """Return the rows of the cells that the command named, in their order."""
    rows = {
        str(row["cell_id"]): {str(k): v for k, v in row.items()} for row in cells.to_dict("records")
    }
    return [rows[cell_id] for cell_id, entry in plan.entries.items() if not entry.is_added_baseline]


def submitted_rows(plan: SweepPlan) -> list[Row]:
    """Return a row for each cell that was named, where they still have to run somewhere else."""
    return [
        {"cell_id": cell_id, "status": SUBMITTED}
        for cell_id, entry in plan.entries.items()
        if not entry.is_added_baseline
    ]


def searches_of(session: Session) -> Searches | None:
    """Return the search for limits that the settings ask for; None for a plain grid.

    Raises:
        BadValueError: the settings of the search contradict the grid.
    """
    check_tracker(session.tracker)
    limit = limit_of(session.settings.limit, session.cells)
    return Searches(session.cells, limit, session.composer) if limit else None


def search_limits(session: Session, searches: Searches) -> list[Search]:
    """Run the rounds of a search for limits; return what was found for each cell.

    Raises:
        BadValueError: two cells of the grid are the same one, or results are not waited for.
    """
    from vitsweep.report.views import collect

    session.launcher.check_that_results_are_awaited()

    def run_round(number: int, probed: list[ComposedCell]) -> Sequence[Row]:
        values = ", ".join(cell.overrides[-1].partition("=")[2] for cell in probed)
        session.console.print(
            f"Round {number} of the search for the largest `{searches.key}`: {values}",
            highlight=False,
        )
        with measured(session, probed) as result:
            rows = rows_of(collect(result.store), result.plan)
        if len(rows) != len(probed):
            raise BadValueError(
                f"{len(probed) - len(rows)} cells of the grid are the same as others; `sweep.limit` "
                "needs each once: leave out what changes nothing."
            )
        return rows

    return searches.run(run_round)
