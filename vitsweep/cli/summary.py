"""The end of a command: views, table, charts and report of what was measured, and the exit code."""

from collections.abc import Mapping, Sequence
from typing import Any

from pandas import DataFrame
from rich.console import Console

from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.console import open_console, saying
from vitsweep.errors import ExitCode, ImpossibleCellError
from vitsweep.launchers.base import LaunchResult
from vitsweep.planning.freeze import store_of
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.report.html import write_report
from vitsweep.report.views import collect
from vitsweep.results.record import Status
from vitsweep.results.trackers import mirror
from vitsweep.tables.limits import limit_answer, limits, presented_limits
from vitsweep.tables.replicates import replicate_key, replicates
from vitsweep.tables.terminal import ResultTable, as_table

SUBMITTED = "submitted"
"""Instead of a status, where a launcher returns before its cells have run."""

Rows = list[Mapping[str, Any]]


def summarize(
    result: LaunchResult, console: Console, tracker: Mapping[str, Any] | None = None
) -> Rows:
    """Write the views, show the table, and return the rows of the command's cells.

    Args:
        result: of the launcher.
        console: where the table is shown.
        tracker: the composed `tracker` node; its mirror is made last, from the records.

    Raises:
        SystemExit: 130 after an interruption.
        ImpossibleCellError: every cell is refused.
    """
    if result.submitted:
        if result.interrupted:
            raise SystemExit(ExitCode.interrupted)
        return [
            {"cell_id": cell_id, "status": SUBMITTED}
            for cell_id, entry in result.plan.entries.items()
            if not entry.is_added_baseline
        ]
    store, plan = result.store, result.plan
    table = collect(store)
    mine = table[table["cell_id"].isin(plan.entries)]
    if not plan.runnable:
        raise ImpossibleCellError([r for e in plan.entries.values() for r in e.reasons])
    console.print()
    key = replicate_key(store.commands())
    console.print(ResultTable(replicates(mine, key) if key else mine, store.name))
    if (mine["status"] == Status.measured).any():
        with saying(console, lambda: "Drawing the charts of the report."):
            page = write_report(store)
        console.print(f"Report: {page}", highlight=False, soft_wrap=True)
    if message := mirror(store, [dict(r) for r in mine.to_dict("records")], tracker or {}):  # type: ignore[arg-type]
        console.print(message, highlight=False)
    _exit_if_interrupted(result, console)
    return _rows(mine, plan)


def rows_of(result: LaunchResult, console: Console) -> Rows:
    """Write the views and return the rows of the command's cells; nothing is shown.

    Raises:
        SystemExit: 130 after an interruption.
    """
    if result.submitted and result.interrupted:
        raise SystemExit(ExitCode.interrupted)
    table = collect(result.store)
    _exit_if_interrupted(result, console)
    return _rows(table, result.plan)


def summarize_limits(config: Mapping[str, Any], key: str) -> None:
    """Show the largest value of `key` that each cell of a search could train with; write the report."""
    store, console = store_of(sweep_settings(config)), open_console()
    table = limits(collect(store), key)
    console.print()
    console.print(as_table(presented_limits(table, key), f"Limits of sweep {store.name}"))
    console.print(limit_answer(table, key), highlight=False)
    if (table["fits"] > 0).any():
        console.print(f"Report: {write_report(store)}", highlight=False, soft_wrap=True)


def _exit_if_interrupted(result: LaunchResult, console: Console) -> None:
    if result.interrupted:
        console.print("Stopped. What was measured is kept; the same command continues.")
        raise SystemExit(ExitCode.interrupted)


def _rows(cells: DataFrame, plan: SweepPlan) -> Rows:
    """Return the rows of the cells that the command named, in their order."""
    rows = {
        str(row["cell_id"]): {str(k): v for k, v in row.items()} for row in cells.to_dict("records")
    }
    return [rows[cell_id] for cell_id, entry in plan.entries.items() if not entry.is_added_baseline]


def exit_code(rows: Sequence[Mapping[str, Any]]) -> ExitCode:
    """Return 0 if all cells are measured or submitted, 3 if some were not measured."""
    fine = all(row["status"] in (Status.measured, SUBMITTED) for row in rows)
    return ExitCode.ok if fine else ExitCode.not_all_measured
