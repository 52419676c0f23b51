"""Cells that share a reason, in one line instead of one long row each."""

from collections.abc import Mapping, Sequence

from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.columns import varying
from vitsweep.tables.formatting import as_text, count, plain

Settings = Mapping[str, str]
"""Key -> value of what distinguishes a cell from the others."""


def unmeasured_lines(cells: DataFrame) -> list[str]:
    """Return one line per status and reason of the cells that were not measured."""
    return lines_of(cells, cells["status"] != Status.measured)


def lines_of(cells: DataFrame, chosen: Series) -> list[str]:
    """Return one line per status and reason of the chosen cells; the others tell them apart."""
    columns = varying(cells)
    settings = as_text(cells[columns]).to_dict("records") if columns else [{}] * len(cells)
    rows = zip(cells["status"], cells["reason"], chosen, strict=True)
    return reason_lines(
        [{str(key): str(value) for key, value in row.items()} for row in settings],
        [_reason(status, reason) if is_chosen else "" for status, reason, is_chosen in rows],
    )


def _reason(status: object, reason: object) -> str:
    word = plain(status).replace("_", " ") or "not run"
    text = " ".join(plain(reason).split())
    return f"{word}: {text}" if text else word


def reason_lines(settings: Sequence[Settings], reasons: Sequence[str]) -> list[str]:
    """Return one line per reason, "4 cells with `sharding=none`: ...", in order of appearance.

    Args:
        settings: of every cell, those without a reason too: they tell what a group has in common
            that the other cells do not have.
        reasons: of every cell; empty for a cell that has none.
    """
    groups: dict[str, list[int]] = {}
    for index, reason in enumerate(reasons):
        if reason:
            groups.setdefault(reason, []).append(index)
    return [
        f"{count(len(members), 'cell')}{_common(settings, members)}: {reason}"
        for reason, members in groups.items()
    ]


def _common(settings: Sequence[Settings], members: Sequence[int]) -> str:
    """Return the setting that only the members have, else all that they share but not every cell."""
    first = settings[members[0]]
    others = [cell for index, cell in enumerate(settings) if index not in set(members)]
    shared = [
        key
        for key, value in first.items()
        if all(settings[index].get(key) == value for index in members)
        and any(cell.get(key) != value for cell in settings)
    ]
    alone = [key for key in shared if all(cell.get(key) != first[key] for cell in others)]
    named = alone[:1] or shared
    return f" with `{' '.join(f'{key}={first[key]}' for key in named)}`" if named else ""
