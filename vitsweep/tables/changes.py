"""What a cell changes against its baseline, choice by choice."""

from pandas import DataFrame, Series

from vitsweep.tables.columns import varying
from vitsweep.tables.words import plain

Changes = frozenset[str]


def with_changes(cells: DataFrame) -> DataFrame:
    """Add `changes`: the `group=choice` settings in which a cell differs from its baseline.

    Only columns that `varying` keeps are compared, so that a setting which follows from another
    (`num_tokens` from `classifier`) is not counted twice. Cells without a baseline row in the
    table are left out.
    """
    columns = varying(cells)
    choices = cells.set_index("cell_id")[columns]
    compared = cells[cells["baseline_cell_id"].isin(choices.index)]
    changes = [
        _changes(row, choices.loc[row["baseline_cell_id"]], columns)
        for _, row in compared.iterrows()
    ]
    return compared.assign(changes=Series(changes, compared.index, dtype=object))


def named(changes: Changes) -> str:
    """Return changes as one label, `precision=O1 + sharding=fsdp`; none is the baseline."""
    return " + ".join(sorted(changes)) or "baseline"


def _changes(row: Series, base: Series, columns: list[str]) -> Changes:
    return frozenset(f"{c}={plain(row[c])}" for c in columns if plain(row[c]) != plain(base[c]))
