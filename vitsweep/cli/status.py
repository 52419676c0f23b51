"""`vitsweep status`: the jobs and cells of a submitted sweep, from any terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitsweep.cli.verbs import VERBS, Options
from vitsweep.console import open_console
from vitsweep.launchers.slurm.state.status import status
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


def run(arguments: Sequence[str]) -> int:
    """Show jobs and cells; return 3 where nothing runs any more and cells were not measured."""
    options = VERBS["status"].parser()
    typed = options.read(arguments)
    if typed.all and (typed.sweep or typed.watch):
        options.error("--all lists all sweeps: it takes neither SWEEP nor --watch")
    if typed.all:
        open_console().print(_sweeps())
        return 0
    return status(find_sweep(typed.sweep), typed.watch, open_console())


def _sweeps() -> "RenderableType":
    """Return a table of the sweeps under `results/`, that of the latest command first."""
    from pandas import DataFrame

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
    return TextTable(DataFrame(rows)) if rows else f"There is no sweep under `{RESULTS}/` yet."
