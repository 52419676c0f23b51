"""The end of a command: tables, charts, report, and the exit code."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pandas import DataFrame
from rich.console import Console

from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.console import open_console
from vitsweep.errors import ImpossibleCellError
from vitsweep.planning.freeze import store_of
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.report.html import write_report
from vitsweep.report.views import collect
from vitsweep.results.metrics import FLAGS
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.results.trackers import mirror
from vitsweep.tables.limits import limit_answer, limits, presented_limits
from vitsweep.tables.show import as_table, printed

OK, ENDED_OTHERWISE, INTERRUPTED = 0, 3, 130
SUBMITTED = "submitted"
"""Instead of a status, where a launcher returns before its cells have run."""

Rows = list[Mapping[str, Any]]
Ending = Callable[[Store, SweepPlan, Console, bool, Mapping[str, Any] | None], Rows]
"""What a launcher does when its cells have run: store, plan, console, interrupted, tracker."""


def finish(
    store: Store,
    plan: SweepPlan,
    console: Console,
    interrupted: bool,
    tracker: Mapping[str, Any] | None = None,
) -> Rows:
    """Write the views, show the table, and return the rows of the command's cells.

    `tracker` is the composed node; the mirror it asks for is made last, from the records.

    Raises:
        SystemExit: 130 after an interruption.
        ImpossibleCellError: every cell is refused.
    """
    table = collect(store)
    mine = table[table["cell_id"].isin(plan.entries)]
    if not plan.runnable:
        raise ImpossibleCellError([r for e in plan.entries.values() for r in e.reasons])
    console.print()
    console.print(printed(mine, title=f"Sweep {store.name}"))
    explain(mine, console)
    if (mine["status"] == Status.measured).any():
        console.print(f"Report: {write_report(store)}", highlight=False, soft_wrap=True)
    if told := mirror(store, [dict(r) for r in mine.to_dict("records")], tracker or {}):  # type: ignore[arg-type]
        console.print(told, highlight=False)
    _refuse_to_go_on(interrupted, console)
    return _rows(mine, plan)


def rows_alone(
    store: Store,
    plan: SweepPlan,
    console: Console,
    interrupted: bool,
    tracker: Mapping[str, Any] | None = None,
) -> Rows:
    """Return the rows of cells that others will follow; the views are written, nothing is shown.

    Raises:
        SystemExit: 130 after an interruption.
    """
    table = collect(store)
    _refuse_to_go_on(interrupted, console)
    return _rows(table, plan)


def finish_search(config: Mapping[str, Any], key: str) -> None:
    """Show what a search for limits found in its sweep, and write the report."""
    store, console = store_of(sweep_settings(config)), open_console()
    table = limits(collect(store), key)
    console.print()
    console.print(as_table(presented_limits(table, key), f"Limits of sweep {store.name}"))
    console.print(limit_answer(table, key), highlight=False)
    if (table["fits"] > 0).any():
        console.print(f"Report: {write_report(store)}", highlight=False, soft_wrap=True)


def _refuse_to_go_on(interrupted: bool, console: Console) -> None:
    if interrupted:
        console.print("Stopped. What was measured is kept; the same command continues.")
        raise SystemExit(INTERRUPTED)


def _rows(cells: DataFrame, plan: SweepPlan) -> Rows:
    """Return the rows of the cells that were asked for, in their order."""
    rows = {
        str(row["cell_id"]): {str(k): v for k, v in row.items()} for row in cells.to_dict("records")
    }
    return [rows[cell_id] for cell_id, entry in plan.entries.items() if not entry.is_added_baseline]


def exit_code(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return 0 if all cells are measured, or on their way; 3 if some ended otherwise."""
    fine = (Status.measured, SUBMITTED)
    return OK if all(row["status"] in fine for row in rows) else ENDED_OTHERWISE


def explain(cells: DataFrame, console: Console) -> None:
    """Say what the validity flags of some cells mean."""
    for column, flag in FLAGS.items():
        if flag.advice and column in cells and cells[column].eq(True).any():
            console.print(f"Note: {flag.advice}", style="dim", highlight=False)
