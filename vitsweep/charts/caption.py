"""The line below a chart: device, versions, dates, unmeasured cells and validity flags."""

from collections.abc import Sequence

import pandas as pd
from pandas import DataFrame

from vitsweep.results.metrics import FLAGS
from vitsweep.results.record import Status
from vitsweep.tables.formatting import plain
from vitsweep.tables.valid_runs import checked_cells


def caption(cells: DataFrame) -> str:
    """Return device, versions, ranks, dates, what is left out, and which flags are set."""
    cells = checked_cells(cells)
    measured = cells[cells["status"] == Status.measured]
    parts = [
        values(measured, "device"),
        ranks(measured),
        _prefixed("torch ", values(measured, "torch")),
        _prefixed("CUDA ", values(measured, "cuda")),
        dates(measured),
        f"{len(measured)} of {len(cells)} cells measured",
        *left_out(cells),
        *flags(measured),
    ]
    return " · ".join(part for part in parts if part)


def values(cells: DataFrame, column: str, most: int = 3) -> str:
    """Return the distinct values of a column, `a, b, c and 2 more`."""
    if column not in cells:
        return ""
    found = list(dict.fromkeys(cells[column].dropna().astype(str)))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def ranks(cells: DataFrame) -> str:
    """Return `2 ranks` or `1 to 8 ranks`."""
    if "world_size" not in cells or cells["world_size"].dropna().empty:
        return ""
    low, high = int(cells["world_size"].min()), int(cells["world_size"].max())
    return f"{low} to {high} ranks" if low != high else f"{high} rank{'s' * (high != 1)}"


def dates(cells: DataFrame) -> str:
    """Return the day of the measurement, or `first to last` day."""
    if "started_at" not in cells:
        return ""
    days = pd.to_datetime(cells["started_at"], errors="coerce", utc=True, format="ISO8601").dropna()
    ends = (
        list(dict.fromkeys(day.strftime("%Y-%m-%d") for day in (days.min(), days.max())))
        if len(days)
        else []
    )
    return " to ".join(ends)


def left_out(cells: DataFrame) -> Sequence[str]:
    """Return `left out: 2 out of memory, 1 invalid` where cells were not measured."""
    others = cells.loc[cells["status"] != Status.measured, "status"]
    counts = others.map(lambda s: plain(s) or "not run").astype(str).value_counts()
    listed = ", ".join(f"{n} {str(status).replace('_', ' ')}" for status, n in counts.items())
    return [f"left out: {listed}"] if listed else []


def flags(cells: DataFrame) -> Sequence[str]:
    """Return a sentence for each validity flag, with the number of cells it holds for."""
    counts = {flag: int(cells[flag].eq(True).sum()) for flag in FLAGS if flag in cells}
    return [
        f"{FLAGS[flag].caption} ({'all' if n == len(cells) else n} cells)"
        for flag, n in counts.items()
        if n
    ]


def _prefixed(prefix: str, text: str) -> str:
    return prefix + text if text else ""
