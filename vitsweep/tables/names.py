"""Short names of cells: what they change, where many choices vary."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from pandas import DataFrame, Series

from vitsweep.tables.columns import varying
from vitsweep.tables.formatting import as_text, plain, value_label

Row = dict[Hashable, Any]

FEW = 2
"""Up to so many varying columns are all named; beyond it, what differs from the baseline."""


def cell_names(cells: DataFrame, columns: Sequence[str] | None = None) -> Series:
    """Return a name per cell: `O1 · fsdp`, or with many varying columns `O1 + fsdp`.

    The short form names only what differs from the cell's baseline (or, where that is not in the
    table, from the commonest value), and every column in which the baselines themselves differ.
    """
    named = list(varying(cells) if columns is None else columns)
    rows = as_text(cells[named]).to_dict("records") if named else [{} for _ in range(len(cells))]
    full = [_joined(row, named, " · ") for row in rows]
    texts = full if len(named) <= FEW else _short(cells, rows, named, full)
    unnamed = plain(cells["model"].iloc[0]) if "model" in cells and len(cells) else ""
    return Series([text or unnamed for text in texts], cells.index, dtype=object)


def _short(cells: DataFrame, rows: list[Row], columns: list[str], full: list[str]) -> list[str]:
    known = dict(zip(cells["cell_id"], rows, strict=True))
    baselines = cells.get("baseline_cell_id", Series(None, cells.index, dtype=object))
    commonest = {c: Counter(row[c] for row in rows).most_common(1)[0][0] for c in columns}
    references = [known.get(baseline, commonest) for baseline in baselines]
    apart = [c for c in columns if len({reference[c] for reference in references}) > 1]
    names = []
    for row, reference, baseline, whole in zip(rows, references, baselines, full, strict=True):
        changed = [c for c in columns if row[c] != reference[c] and c not in apart]
        change, size = _joined(row, changed, " + "), _joined(row, apart, " · ")
        short = " · ".join(part for part in (change or "baseline", size) if part)
        names.append(short if change or baseline in known else whole)
    return names


def _joined(row: Row, columns: list[str], separator: str) -> str:
    return separator.join(name for c in columns if (name := value_label(c, row[c])))
