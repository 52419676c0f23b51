"""From a sweep folder to tidy tables: one row per run, one row per cell."""

import json

import pandas as pd
from pandas import DataFrame

from vitsweep.results.store import Store
from vitsweep.tables.cells import cells


def runs_of(store: Store) -> DataFrame:
    """Return one row per run of a store, failed ones included."""
    return DataFrame([run.row() for run in store.runs()])


def cells_of(store: Store) -> DataFrame:
    """Return one row per cell of a store, whatever became of it."""
    return cells(runs_of(store), store.baselines(), unrun_of(store))


def unrun_of(store: Store) -> DataFrame:
    """Return the cells that have no run: refused by a rule (`record.json`), or waiting."""
    folders = [f for f in sorted(store.cells.glob("*")) if not any(f.glob("runs/*.json"))]
    rows = []
    for folder in folders:
        record = folder / "record.json"
        known = json.loads(record.read_text()) if record.exists() else {}
        rows.append({"cell_id": folder.name, "sweep": store.name, "status": None} | known)
    return pd.DataFrame(rows)
