"""Which charts a report shows, each only where the table has what it needs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import phases, speedup
from vitsweep.charts.caption import caption


@dataclass(frozen=True)
class Chart:
    """One chart of the report; `name` is its file name."""

    name: str
    title: str
    draw: Callable[[DataFrame], Figure]
    applies: Callable[[DataFrame], bool]
    reading: str


CHARTS = (
    Chart(
        "speedup",
        "Speedup over the baseline",
        speedup.draw,
        lambda cells: cells["speedup"].notna().sum() > 1,
        "Whiskers: 95 % interval of the ratio over paired blocks. Hatched: nothing is claimed.",
    ),
    Chart(
        "phases",
        "Where the step's time goes",
        phases.draw,
        lambda cells: any(p in cells and cells[p].notna().any() for p in phases.PHASES),
        "Phases come from instrumented steps of their own; the diamond is the timed step.",
    ),
)


def drawn(cells: DataFrame) -> Iterator[tuple[Chart, Figure, str]]:
    """Yield chart, figure and caption for every chart the cells have the columns for."""
    if cells.empty or "speedup" not in cells:
        return
    for chart in CHARTS:
        if chart.applies(cells):
            yield chart, chart.draw(cells), f"{chart.reading} {caption(cells)}."
