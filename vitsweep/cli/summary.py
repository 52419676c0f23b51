"""The end of a command: views, table, charts and report of what was measured, and the exit code."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from vitsweep.api.functions import Row, collected, rows_of, submitted_rows
from vitsweep.console import open_console, print_lines, was_terminated
from vitsweep.data.damaged_images import DAMAGED_LIST, read_damaged
from vitsweep.extras import each
from vitsweep.launchers.base import LaunchResult
from vitsweep.planning.freeze import command_line
from vitsweep.report.answer import answers, next_command, search_result
from vitsweep.report.html import write_report
from vitsweep.results.record import Status
from vitsweep.results.sweeps import sweep_argument
from vitsweep.tables.formatting import count
from vitsweep.tables.notes import empty_metrics
from vitsweep.tables.render import CellTable, TextTable


def summarize(
    result: LaunchResult,
    progress: Console,
    tracker: Any = None,
    *,
    with_report: bool = True,
    said: Sequence[str] = (),
) -> list[Row]:
    """Write the views, show the table, and return the rows of the command's cells.

    Args:
        result: of the launcher.
        progress: where the message on charts goes; all else is a result, and goes to stdout.
        tracker: of `extras.tracker`; its mirror is made last, from the records.
        with_report: draw the charts and the page as well.
        said: the result as sentences, instead of the answer and what to type next.

    Raises:
        ImpossibleCellError: every cell is refused.
    """
    if result.submitted:
        if tracker:
            progress.print(
                "W&B gets the cells from the same command, typed again when the jobs have ended."
            )
        return submitted_rows(result.plan)
    store, (tables, mine), console = result.store, collected(result), open_console()
    console.print()
    if found := search_result(tables):
        console.print(TextTable(found.table, found.title))
        if found.num_more:
            console.print(f"{found.num_more} more cells stand in the report.")
        print_lines(console, found.lines)
    else:
        console.print(CellTable(tables.settings_of(mine), sweep_argument(store)))
        for below in each(tables.features, "below"):
            console.print(below(tables))
        stopped = [f"Stopped after {result.reached}."] if result.interrupted else []
        after = "" if stopped else next_command(tables.settings_of(mine), command_line(), mine)
        said = said or [*answers(tables, mine), *stopped, *filter(None, [after])]
    print_lines(console, empty_metrics(tables.runs))
    if damaged := read_damaged(store.root):
        console.print(
            f"{count(len(damaged), 'image')} of this sweep's data cannot be read, and training takes others "
            f"instead: `{store.root / DAMAGED_LIST}` names each."
        )
    if was_terminated():
        print_lines(
            console, [*said, f"`vitsweep collect {sweep_argument(store)}` writes its tables."]
        )
        return rows_of(mine, result.plan)
    if with_report and (mine["status"] == Status.measured).any():
        progress.print("Drawing the charts of the report.")
        page = write_report(tables)
        console.print(f"Report: {page}", soft_wrap=True)
    if tracker:
        console.print(tracker(store, mine, said))
    print_lines(console, said)
    return rows_of(mine, result.plan)
