"""Short names of cells, and what a cell changes against its baseline."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

from pandas import DataFrame, Series

from vitsweep.tables.checks import checked_cells
from vitsweep.tables.columns import varying
from vitsweep.tables.formatting import as_text, plain, value_label

Row = dict[Hashable, Any]

FEW = 2
"""Up to this many varying columns are all named; with more, only what differs from the baseline."""


def cell_names(cells: DataFrame, columns: Sequence[str] | None = None) -> Series:
    """Return a name per cell: `O1 · fsdp`, or with many varying columns `O1 + fsdp`.

    The short form names only what differs from the cell's baseline (or, where that is not in the
    table, from the commonest value), and every column in which the baselines themselves differ.
    """
    parts = name_parts(cells, columns)
    return Series(
        [" · ".join(filter(None, row)) for row in parts.to_numpy().tolist()],
        cells.index,
        dtype=object,
    )


def name_parts(cells: DataFrame, columns: Sequence[str] | None = None) -> DataFrame:
    """Return the two parts of a cell's name, `change` and `match`.

    The first is what differs from its baseline, `O1 + fsdp`; the second is what it shares with its
    baseline where baselines differ, `4 ranks · 64 images`, empty for up to two varying columns.
    """
    named = [c for c in (varying(cells) if columns is None else columns) if c in cells]
    rows = as_text(cells[named]).to_dict("records") if named else [{} for _ in range(len(cells))]
    full = [_joined(row, named, " · ") for row in rows]
    few = len(named) <= FEW or not rows
    parts = [(whole, "") for whole in full] if few else _short(cells, rows, named, full)
    unnamed = plain(cells["model"].iloc[0]) if "model" in cells and len(cells) else ""
    texts = [(change or ("" if match else unnamed), match) for change, match in parts]
    return DataFrame(texts, cells.index, columns=["change", "match"], dtype=object)


def _short(
    cells: DataFrame, rows: list[Row], columns: list[str], full: list[str]
) -> list[tuple[str, str]]:
    known = dict(zip(cells.get("cell_id", Series(None, cells.index)), rows, strict=True))
    baselines = cells.get("baseline_cell_id", Series(None, cells.index, dtype=object))
    commonest = {c: Counter(row[c] for row in rows).most_common(1)[0][0] for c in columns}
    references = [known.get(baseline, commonest) for baseline in baselines]
    apart = [c for c in columns if len({reference[c] for reference in references}) > 1]
    names = []
    for row, reference, baseline, whole in zip(rows, references, baselines, full, strict=True):
        changed = [c for c in columns if row[c] != reference[c] and c not in apart]
        change, match = _joined(row, changed, " + "), _joined(row, apart, " · ")
        is_named = change or baseline in known
        names.append((change or "baseline", match) if is_named else (whole, ""))
    return names


def _joined(row: Row, columns: list[str], separator: str) -> str:
    return separator.join(name for c in columns if (name := value_label(c, row[c])))


Changes = frozenset[str]


def with_changes(cells: DataFrame) -> DataFrame:
    """Add `changes`: a set of the `column=value` settings in which a cell differs from its baseline.

    Only columns that `varying` keeps are compared, so that a setting that is determined by another
    (`num_tokens` from `classifier`) is not counted twice. Cells without a baseline row in the
    table are left out.
    """
    cells = checked_cells(cells, "baseline_cell_id")
    columns = varying(cells)
    rows = (
        as_text(cells[columns]).to_dict("records") if columns else [{} for _ in range(len(cells))]
    )
    known = dict(zip(cells["cell_id"], rows, strict=True))
    compared = cells["baseline_cell_id"].isin(list(known))
    pairs = zip(rows, cells["baseline_cell_id"], compared, strict=True)
    changes = [_changes(row, known[baseline]) for row, baseline, is_known in pairs if is_known]
    return cells[compared].assign(changes=Series(changes, cells.index[compared], dtype=object))


def named(changes: Changes) -> str:
    """Return changes as one label, `precision=O1 + sharding=fsdp`, or `baseline` if there are none."""
    return " + ".join(sorted(changes)) or "baseline"


def _changes(row: dict[Hashable, Any], base: dict[Hashable, Any]) -> Changes:
    return frozenset(f"{c}={value}" for c, value in row.items() if value != base[c])
