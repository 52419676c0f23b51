"""The charts of a report; each is drawn where the sweep has data for it."""

import warnings
from collections.abc import Callable, Iterator
from importlib import import_module

from matplotlib.figure import Figure

from vitsweep.charts import style
from vitsweep.charts.style import Chart
from vitsweep.tables.sweep_tables import SweepTables


class ChartWarning(UserWarning):
    """A chart could not be drawn; the report is written without it."""


NAMES = (
    "race",
    "limits",
    "speedup",
    "waterfall",
    "causes",
    "bounds",
    "heat_map",
    "effects",
    "phases",
    "optimizer_step",
    "roofline",
    "scaling",
    "gpu_scaling",
    "sequence_length",
    "communication",
    "memory",
    "pareto",
    "accuracy",
    "training_curves",
    "epoch_hours",
    "per_chip",
)
"""Files of `vitsweep.charts` in the order of the page."""

CHARTS: tuple[Chart, ...] = tuple(import_module(f"vitsweep.charts.{name}").CHART for name in NAMES)


def drawn(
    tables: SweepTables, laid_out: Callable[[Figure], Figure | None] = style.freeze_layout
) -> Iterator[tuple[Chart, Figure, str]]:
    """Yield chart, figure and how to read it for every chart that the sweep has the columns for.

    Args:
        tables: of the sweep.
        laid_out: returns a figure as it is saved; None leaves it out.
    """
    if tables.runs.empty:
        return
    for chart in CHARTS:
        try:
            table = chart.table(tables)
            if len(table):
                figure = laid_out(chart.draw(table))
                if figure is None:
                    continue
                reading = chart.reading if isinstance(chart.reading, str) else chart.reading(table)
                yield chart, figure, reading
        except Exception as error:  # a failing chart must not prevent the report of a long sweep
            text = f"the chart `{chart.name}` could not be drawn: {type(error).__name__}: {error}"
            warnings.warn(text, ChartWarning, stacklevel=2)
