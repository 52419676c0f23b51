"""`vitsweep collect`: the parquet and CSV files of a sweep, written anew, and its table."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitsweep.cli import VERBS, Options, print_json, rows_of
from vitsweep.console import open_console, print_lines
from vitsweep.errors import BadValueError
from vitsweep.execution.attempts import is_alive, record_unfinished, unfinished
from vitsweep.extras import each
from vitsweep.launchers.slurm.state.poll import poll, reconcile, reconcile_hint
from vitsweep.launchers.slurm.state.status import continue_hint, outcomes_of
from vitsweep.report.answer import answers, best_cells
from vitsweep.report.views import collect, for_people
from vitsweep.results.sweeps import find_sweep, sweep_argument
from vitsweep.tables.formatting import count
from vitsweep.tables.names import cell_names
from vitsweep.tables.notes import empty_metrics
from vitsweep.tables.render import (
    BEST,
    CellTable,
    TextTable,
    named_columns,
    pick,
    ranked,
)
from vitsweep.tables.sweep_tables import SweepTables

if TYPE_CHECKING:
    from vitsweep.results.store import Store


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()
    options.add_argument("--rows", metavar="N", help="show so many cells, or all (the best 20)")
    options.add_argument("--columns", metavar="A,B", help="show these columns of cells.parquet")
    options.flag(
        "--reconcile", help="first record runs that dead jobs or killed commands left unfinished"
    )
    options.add_json()


def run(arguments: Sequence[str]) -> int:
    """Write the views of a sweep and show its table; return 0."""
    typed = VERBS["collect"].read(arguments)
    if typed.rows not in (None, "all") and not (typed.rows.isdecimal() and int(typed.rows)):
        raise BadValueError(f"`--rows {typed.rows}` must be a number above zero, or `all`.")
    store = find_sweep(typed.sweep)
    if typed.reconcile:
        reconcile(store)
        if not store.is_locked():  # else the command at work may be recording them
            record_unfinished(store, store.cell_ids())
    console, tables = open_console(), SweepTables.of(store)
    try:
        collect(tables)
    except PermissionError as error:
        print(
            f"`{error.filename}` cannot be written ({error.strerror}): parquet, CSV and report stay as "
            "they were. The table below is of the runs as they are now.",
            file=sys.stderr,
        )
    cells = named = tables.cells if typed.columns else tables.settings
    most_rows = len(cells) if typed.rows == "all" else int(typed.rows or BEST)
    names = [name.strip() for name in (typed.columns or "").split(",")]
    if typed.columns is None:  # the table at the end of a sweep
        console.print(CellTable(cells, sweep_argument(store), most_rows))
    else:
        named = ranked(cells.assign(cell=cell_names(cells)))
        console.print(TextTable(pick(named, names).head(most_rows), f"Sweep {store.name}"))
    if not typed.columns:
        for below in each(tables.features, "below"):
            console.print(below(tables))
    said = [] if typed.columns or tables.cells.empty else answers(tables)
    print_lines(console, [*said, *empty_metrics(tables.runs)])
    jobs = poll(store)
    missing = continue_hint(store, jobs, outcomes_of(store, jobs))
    hints = missing, reconcile_hint(store, jobs), _killed_hint(store)
    for hint in filter(None, hints):
        console.print(hint)
    if typed.json:
        typed_columns = named_columns(named, names) if typed.columns else []
        shown = named[typed_columns] if typed.columns else for_people(ranked(tables.cells))
        found = {"answers": answers(tables), "best": best_cells(tables)}
        print_json(sweep=store.name, folder=store.root, **found, cells=rows_of(shown))
    return 0


def _killed_hint(store: "Store") -> str:
    """Return how to record runs on this machine that were killed with their command, or ""."""
    last = [unfinished(store, cell_id)[-1:] for cell_id in store.cells_without_runs()]
    num_dead = sum(not is_alive(store, run) for runs in last for run in runs)
    if not num_dead:
        return ""
    return (
        f"{count(num_dead, 'cell')} of those not run had started when the command that ran them was "
        f"killed: `vitsweep collect {sweep_argument(store)} --reconcile` records it, `vitsweep retry "
        f"{sweep_argument(store)}` runs them again."
    )
