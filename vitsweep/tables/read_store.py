"""The records of one sweep folder as rows."""

from collections.abc import Iterable, Iterator
from typing import Any

from pandas import DataFrame

from vitsweep.results.record import RunRecord, column_number
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import register


def runs_of(store: Store) -> DataFrame:
    """Return one row per run of a store, failed ones included; damaged records cause a warning."""
    register(store)
    return from_rows(rows_of(store, store.runs()))


def rows_of(store: Store, records: Iterable[RunRecord]) -> Iterator[dict[str, Any]]:
    """Yield a row per record; `sweep` is the folder's name, also where it was renamed or copied."""
    for record in records:
        yield record.row() | {"sweep": store.name}


def unrun_of(store: Store) -> DataFrame:
    """Return the cells that have no run: invalid, never started (see `record.json`), or waiting."""
    rows = [
        {"cell_id": cell_id, "sweep": None, "status": None}
        | _known(store, cell_id)
        | {"sweep": store.name}
        for cell_id in store.cells_without_runs()
    ]
    return DataFrame(rows)


def from_rows(rows: Iterable[dict[str, Any]]) -> DataFrame:
    """Build a table column by column: equal texts are kept once, so 100,000 rows stay small."""
    columns: dict[str, list[Any]] = {}
    seen: dict[str, str] = {}
    for count, row in enumerate(rows):
        for key, value in row.items():
            if key not in columns:
                columns[key] = [None] * count
            columns[key].append(seen.setdefault(value, value) if type(value) is str else value)
        if len(row) < len(columns):
            for column in columns.values():
                column.extend([None] * (count + 1 - len(column)))
    return DataFrame(columns)


def _known(store: Store, cell_id: str) -> dict[str, Any]:
    """Return the row of a cell that never ran: its kept row, with its frozen choices if it has none."""
    row = store.kept_row(cell_id)
    if "model" in row or not (store.cell(cell_id) / "cell.yaml").exists():
        return row
    parts = store.frozen(cell_id)["cell"]
    choices = {k: v["name"] for k, v in parts.items() if isinstance(v, dict) and "name" in v}
    values = {k: v for k, v in parts.items() if not isinstance(v, dict)}
    numbers = {k: column_number(str(v)) for k, v in values.items() if type(v) is int}
    return choices | values | numbers | row
