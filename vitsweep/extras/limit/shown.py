"""What terminal and report show of a search for limits."""

from markupsafe import Markup

from vitsweep.api.session import Session
from vitsweep.console import open_console, print_lines, was_terminated
from vitsweep.extras.limit.table import limit_answer, limits, limits_text
from vitsweep.files import write_atomically
from vitsweep.report.answer import SearchResult
from vitsweep.report.html import rendered, write_report
from vitsweep.report.views import collect
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.tables.formatting import csv_text
from vitsweep.tables.notes import empty_metrics
from vitsweep.tables.render import TextTable
from vitsweep.tables.sweep_tables import SweepTables


def limit_key(tables: SweepTables) -> str:
    """Return the key whose largest value the latest command searched for; "" of a grid."""
    limit = tables.commands[-1].get("limit") if tables.commands else None
    return str((limit or {}).get("key") or "")


def result(tables: SweepTables) -> SearchResult:
    """Return table and answer of a search for limits."""
    key = limit_key(tables)
    table, title = limits(tables.cells, key), f"Limits of sweep {tables.stores[0].name}"
    return SearchResult(title, limits_text(table, key), 0, [limit_answer(table, key)])


def section(tables: SweepTables) -> Markup:
    """Return the table of limits, and write `report/limits.csv`; "" where there was no search."""
    if not (key := limit_key(tables)):
        return Markup("")
    table = limits(tables.cells, key)
    write_atomically(tables.stores[0].root / "report" / "limits.csv", csv_text(table))
    shown = limits_text(table, key).to_dict("split")
    return Markup(rendered("limits.html.j2", {"limits": shown}, "vitsweep.extras.limit"))


def show(session: Session) -> None:
    """Show the largest value that each cell of a search could train with."""
    tables, console = collect(Store(session.settings.path)), open_console()
    found = result(tables)
    console.print()
    console.print(TextTable(found.table, found.title))
    print_lines(console, [*found.lines, *empty_metrics(tables.runs)])
    is_measured = (tables.cells["status"] == Status.measured).any()
    if is_measured and session.settings.report and not was_terminated():
        console.print(f"Report: {write_report(tables)}", soft_wrap=True)
