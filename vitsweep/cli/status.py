"""`vitsweep status`: the jobs and cells of a submitted sweep, from any terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitsweep.cli import VERBS, Options, print_json
from vitsweep.console import open_console
from vitsweep.launchers.slurm.state.poll import poll
from vitsweep.launchers.slurm.state.status import outcomes_of, status
from vitsweep.results.store import Store
from vitsweep.results.sweeps import RESULTS, find_sweep, sweep_names
from vitsweep.tables.formatting import tally
from vitsweep.tables.load import cells_of
from vitsweep.tables.render import TextTable

if TYPE_CHECKING:
    from rich.console import RenderableType


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()
    options.flag("--watch", help="until nothing runs any more")
    options.flag("--all", help="list every sweep under results/")
    options.add_json()


def run(arguments: Sequence[str]) -> int:
    """Show jobs and cells; return 3 where nothing runs any more and cells were not measured."""
    options = VERBS["status"].parser()
    typed = options.read(arguments)
    if typed.all and (typed.sweep or typed.watch):
        options.error("--all lists all sweeps: it takes neither SWEEP nor --watch")
    rows = _sweeps() if typed.all else []
    if typed.all and typed.json:
        print_json(sweeps=rows)
    elif typed.all:
        open_console().print(_table(rows))
    if typed.all:
        return 0
    store = find_sweep(typed.sweep)
    code = status(store, typed.watch, open_console())
    if typed.json:
        found = outcomes_of(store, poll(store)).items()
        cells = [{"cell_id": c, "status": str(o.status), "reason": o.reason} for c, o in found]
        print_json(sweep=store.name, folder=store.root, cells=cells)
    return code


def _table(rows: list[dict[str, str]]) -> "RenderableType":
    from pandas import DataFrame

    return TextTable(DataFrame(rows)) if rows else f"There is no sweep under `{RESULTS}/` yet."


def _sweeps() -> list[dict[str, str]]:
    """Return the sweeps under `results/`, that of the latest command first."""
    rows = []
    for name in sweep_names():
        store = Store(RESULTS / name)
        last = (store.commands() or [{}])[-1]
        rows.append(
            {
                "sweep": name,
                "last command": str(last.get("time", ""))[:16].replace("T", " "),
                "cells": tally(cells_of(store)["status"]),
            }
        )
    return rows
