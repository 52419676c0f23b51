"""The records of one sweep folder as rows."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pandas import DataFrame

from vitsweep.results.record import column_number, parsed_json
from vitsweep.results.store import Store


def runs_of(store: Store) -> DataFrame:
    """Return one row per run of a store, failed ones included; damaged records cause a warning."""
    return from_rows(record.row() for record in store.runs())


def unrun_of(store: Store) -> DataFrame:
    """Return the cells that have no run: invalid ones (see `record.json`), and those not run yet."""
    folders = [f for f in sorted(store.cells.glob("*")) if not any(f.glob("runs/*.json"))]
    rows = [{"cell_id": f.name, "sweep": store.name, "status": None} | _known(f) for f in folders]
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


def _known(folder: Path) -> dict[str, Any]:
    """Return the row of a cell that never ran: its record, or its frozen spec."""
    record, frozen = folder / "record.json", folder / "cell.yaml"
    if record.exists():
        known: dict[str, Any] = parsed_json(record.read_text(encoding="utf-8"))
        return known
    parts = yaml.safe_load(frozen.read_text(encoding="utf-8"))["cell"] if frozen.exists() else {}
    choices = {k: v["name"] for k, v in parts.items() if isinstance(v, dict) and "name" in v}
    values = {k: v for k, v in parts.items() if not isinstance(v, dict)}
    return choices | {k: column_number(str(v)) if type(v) is int else v for k, v in values.items()}
