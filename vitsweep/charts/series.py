"""One look per series: colour by its technique, line and marker where the colour repeats.

Baselines are grey, as in every chart.
"""

from dataclasses import dataclass

from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.spec.technique import TECHNIQUE_GROUPS
from vitsweep.tables.columns import CHOICES, varying
from vitsweep.tables.names import cell_names

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
    return [c for c in varying(cells) if c in CHOICES and c not in SIZE_CHOICES]


def labels(cells: DataFrame) -> Series:
    """Return the series each cell belongs to, `O1 · fsdp`."""
    return cell_names(cells, choice_columns(cells))


def looks(cells: DataFrame) -> dict[str, Look]:
    """Return a look per series; series of one colour differ in line and marker."""
    columns = choice_columns(cells)
    group = next((c for c in columns if c in TECHNIQUE_GROUPS), next(iter(columns), "precision"))
    series = labels(cells)
    grey = _baselines(cells, series)
    found: dict[str, Look] = {}
    for label, choice in zip(series, cells[group].astype(str), strict=True):
        colour = style.BASELINE if label in grey else style.colour(group, choice)
        twins = sum(look.colour == colour for other, look in found.items() if other != label)
        place = (style.place(group, choice) + twins) % len(style.MARKERS)
        found.setdefault(label, Look(colour, style.MARKERS[place], LINES[twins % len(LINES)]))
    return found


def _baselines(cells: DataFrame, series: Series) -> set[str]:
    """Return the series that hold nothing but baselines."""
    if "claim" not in cells:
        return set()
    only = (cells["claim"].astype(str) == "baseline").groupby(series).all()
    return {str(name) for name in only.index[only]}


def fastest(table: DataFrame, most: int = MOST_SERIES) -> tuple[DataFrame, str]:
    """Return the rows of the fastest series and of the baseline, and `8 of 40 series` if cut."""
    series = labels(table)
    best = table["images_per_second"].groupby(series).max().sort_values(ascending=False)
    kept = {*best.index[:most], *(n for n in best.index if n.startswith("baseline"))}
    shown = table[series.isin(kept)]
    return shown, f"{len(kept)} fastest of {len(best)}" if len(kept) < len(best) else ""
