"""What a cell changes against its baseline, choice by choice."""

from collections.abc import Hashable
from typing import Any

from pandas import DataFrame, Series

from vitsweep.tables.columns import varying
from vitsweep.tables.formatting import as_text

Changes = frozenset[str]


def with_changes(cells: DataFrame) -> DataFrame:
    """Add `changes`: the `group=choice` settings in which a cell differs from its baseline.

    Only columns that `varying` keeps are compared, so that a setting which follows from another
    (`num_tokens` from `classifier`) is not counted twice. Cells without a baseline row in the
    table are left out.
    """
    columns = varying(cells)
    rows = (
        as_text(cells[columns]).to_dict("records") if columns else [{} for _ in range(len(cells))]
    )
    known = dict(zip(cells["cell_id"], rows, strict=True))
    compared = cells["baseline_cell_id"].isin(list(known))
    pairs = zip(rows, cells["baseline_cell_id"], compared, strict=True)
    changes = [_changes(row, known[baseline]) for row, baseline, known_too in pairs if known_too]
    return cells[compared].assign(changes=Series(changes, cells.index[compared], dtype=object))


def named(changes: Changes) -> str:
    """Return changes as one label, `precision=O1 + sharding=fsdp`; none is the baseline."""
    return " + ".join(sorted(changes)) or "baseline"


def _changes(row: dict[Hashable, Any], base: dict[Hashable, Any]) -> Changes:
    return frozenset(f"{c}={value}" for c, value in row.items() if value != base[c])
