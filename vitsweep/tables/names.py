"""Short names of cells: what they change, where many choices vary."""

from collections.abc import Hashable, Sequence
from typing import Any

from pandas import DataFrame, Series

from vitsweep.tables.columns import varying
from vitsweep.tables.words import cell_label, plain

FEW = 2
"""Up to so many varying columns are all named; beyond it, what differs from the baseline."""


def cell_names(cells: DataFrame, columns: Sequence[str] | None = None) -> Series:
    """Return a name per cell: `O1 · fsdp`, or with many varying columns `O1 + fsdp`.

    The short form names only what differs from the cell's baseline (or, where that is not in the
    table, from the commonest value), and every column in which the baselines themselves differ.
    """
    named = list(varying(cells) if columns is None else columns)
    full = [cell_label(row, named) for _, row in cells.iterrows()]
    texts = full if len(named) <= FEW else _short(cells, named, full)
    unnamed = plain(cells["model"].iloc[0]) if "model" in cells and len(cells) else ""
    return Series([text or unnamed for text in texts], cells.index, dtype=object)


def _short(cells: DataFrame, columns: list[str], full: list[str]) -> list[str]:
    text = DataFrame({c: cells[c].map(plain).astype(str) for c in columns})
    known = dict(zip(cells["cell_id"], text.to_dict("records"), strict=True))
    baselines = cells.get("baseline_cell_id", Series(None, cells.index, dtype=object))
    commonest = text.mode().iloc[0].to_dict()
    references = [known.get(b, commonest) for b in baselines]
    apart = [c for c in columns if len({reference[c] for reference in references}) > 1]
    names = []
    for row, reference, baseline, whole in zip(
        text.to_dict("records"), references, baselines, full, strict=True
    ):
        changed = [c for c in columns if row[c] != reference[c] and c not in apart]
        change = " + ".join(_one(row, c) for c in changed)
        size = " · ".join(_one(row, c) for c in apart)
        short = " · ".join(part for part in (change or "baseline", size) if part)
        names.append(short if change or baseline in known else whole)
    return names


def _one(row: dict[Hashable, Any], column: str) -> str:
    return cell_label(Series(row), [column])
