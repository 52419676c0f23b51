"""One look per series: colour by its technique, line and marker where the colour repeats.

Baselines are grey, as in every chart.
"""

from dataclasses import dataclass

from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.tables.names import CHOICES, cell_names, varying
from vitsweep.tables.stats import Claim

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


def settings(cells: DataFrame) -> Series:
    """Return the setting each cell belongs to, named by all that was varied but the seed.

    Trainings that differ in a learning rate or in the images of a step have no mean in common.
    """
    varied = varying(cells.drop(columns="seed", errors="ignore"))
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
