"""What a chart is: the table it draws, the drawing, the look of its series, and the caption below.

Baselines are grey, as in every chart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.results.metrics import FLAGS
from vitsweep.results.record import Status
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.tables.formatting import count, distinct, span, tally
from vitsweep.tables.names import CHOICES, cell_names, varying_columns
from vitsweep.tables.stats import Claim
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_cells

NOTHING = DataFrame()

HOLLOW = "Hollow or hatched: oversubscribed, so nothing is said about scaling."


@dataclass(frozen=True)
class Chart:
    """One chart of the report; a file of this folder names its own `CHART`.

    Attributes:
        title: heading.
        table: tables of a sweep -> the table that is drawn; empty where there is nothing to draw.
        draw: table -> figure.
        reading: how to read it, the first sentences of the caption; may depend on the table.
    """

    title: str
    table: Callable[[SweepTables], DataFrame]
    draw: Callable[[DataFrame], Figure]
    reading: str | Callable[[DataFrame], str]

    @property
    def name(self) -> str:
        """Name of the file that defines it, and of its pictures."""
        return self.table.__module__.rpartition(".")[2]


def mixed(cells: DataFrame) -> bool:
    """Return whether the measured cells ran on several kinds of device."""
    measured = cells[cells["status"] == Status.measured]
    return "device" in measured and measured["device"].nunique() > 1


# One look per series: colour by its technique, line and marker where the colour repeats.

MOST_SERIES = 8
"""More lines cannot be distinguished."""

LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
SIZE_CHOICES = ("batch", "measurement", "task")


@dataclass(frozen=True)
class Look:
    """How one series is drawn."""

    colour: str
    marker: str
    line: object


def choice_columns(cells: DataFrame) -> list[str]:
    """Return the choices that vary: what a series of a chart is named after."""
    return [c for c in varying_columns(cells) if c in CHOICES and c not in SIZE_CHOICES]


def labels(cells: DataFrame) -> Series:
    """Return the series each cell belongs to, `O1 · fsdp`."""
    return cell_names(cells, choice_columns(cells))


def settings(cells: DataFrame) -> Series:
    """Return the setting each cell belongs to, named by all that was varied but the seed.

    Trainings that differ in a learning rate or in the images of a step have no mean in common.
    """
    varied = varying_columns(cells.drop(columns="seed", errors="ignore"))
    return cell_names(cells, varied)


def looks(cells: DataFrame, series: Series | None = None) -> dict[str, Look]:
    """Return a look per series; series of one colour differ in line and marker.

    Args:
        cells: one row per cell.
        series: name of the series of each cell; by default `labels`.
    """
    columns = choice_columns(cells)
    group = next((c for c in columns if c in GROUPS), next(iter(columns), "precision"))
    series = labels(cells) if series is None else series
    grey = _baselines(cells, series)
    by_choice = bool(columns) or series.nunique() == 1
    found: dict[str, Look] = {}
    for label, choice in zip(series, cells[group].astype(str), strict=True):
        if label in found:
            continue
        place = style.place(group, choice) if by_choice else len(found) % len(style.PALETTE)
        colour = style.BASELINE if label in grey else style.PALETTE[place]
        twins = sum(look.colour == colour for look in found.values())
        marker = style.MARKERS[(place + twins) % len(style.MARKERS)]
        found[label] = Look(colour, marker, LINES[twins % len(LINES)])
    return found


def _baselines(cells: DataFrame, series: Series) -> set[str]:
    """Return the series that hold nothing but baselines."""
    if "claim" not in cells:
        return set()
    only = (cells["claim"].astype(str) == Claim.baseline).groupby(series).all()
    return {str(name) for name in only.index[only]}


def fastest(
    table: DataFrame, most: int = MOST_SERIES, series: Series | None = None
) -> tuple[DataFrame, str]:
    """Return the rows of the fastest series and of the baseline, and `8 fastest of 40` if cut."""
    series = labels(table) if series is None else series
    best = table["images_per_second"].groupby(series).max().sort_values(ascending=False)
    baselines = _baselines(table, series) | {n for n in best.index if n.startswith("baseline")}
    kept = {*best.index[:most], *baselines}
    shown = table[series.isin(kept)]
    if len(kept) == len(best):
        return shown, ""
    also = " and the baseline" if len(kept) > most else ""
    return shown, f"{most} fastest of {len(best)}{also}"


# The line below a chart: device, versions, dates, unmeasured cells and validity flags.


def caption(cells: DataFrame) -> str:
    """Return device, versions, ranks, dates, what is left out, and which flags are set."""
    cells = checked_cells(cells)
    measured = cells[cells["status"] == Status.measured]
    parts = [
        distinct(measured, "device"),
        ranks(measured),
        _prefixed("torch ", distinct(measured, "torch")),
        _prefixed("CUDA ", distinct(measured, "cuda")),
        dates(measured),
        f"{len(measured)} of {len(cells)} cells measured",
        *left_out(cells),
        *flags(measured),
    ]
    return " · ".join(part for part in parts if part)


def ranks(cells: DataFrame) -> str:
    """Return `2 ranks` or `1 to 8 ranks`."""
    if "world_size" not in cells or cells["world_size"].dropna().empty:
        return ""
    low, high = int(cells["world_size"].min()), int(cells["world_size"].max())
    return f"{low} to {high} ranks" if low != high else count(high, "rank")


def dates(cells: DataFrame) -> str:
    """Return the day of the measurement, or `first to last` day."""
    if "started_at" not in cells:
        return ""
    days = pd.to_datetime(cells["started_at"], errors="coerce", utc=True, format="ISO8601").dropna()
    return span(days, lambda day: day.strftime("%Y-%m-%d"))


def left_out(cells: DataFrame) -> Sequence[str]:
    """Return `left out: 2 out of memory, 1 invalid` where cells were not measured."""
    listed = tally(cells.loc[cells["status"] != Status.measured, "status"])
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
