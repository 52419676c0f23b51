"""The charts of a report; each is drawn where the sweep has data for it."""

import warnings
from collections.abc import Callable, Iterator
from importlib import import_module

from markupsafe import Markup
from matplotlib.figure import Figure

from vitsweep.charts import style
from vitsweep.charts.style import Chart
from vitsweep.extras import FEATURES, load
from vitsweep.tables.sweep_tables import SweepTables


class ChartWarning(UserWarning):
    """A chart could not be drawn; the report is written without it."""


NAMES = (
    "race",
    "limits",
    "speedup",
    "waterfall",
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
"""Files of `vitsweep.charts` in the order of the page; those of optional features come between."""

CHARTS: tuple[Chart, ...] = tuple(import_module(f"vitsweep.charts.{name}").CHART for name in NAMES)


def shown_features(tables: SweepTables) -> list[str]:
    """Return the optional features of which the runs of these sweeps hold something."""
    recorded = {key for record in tables.records for key in record.samples}
    return [name for name, feature in FEATURES.items() if feature.recorded in recorded]


def charts_of(tables: SweepTables) -> list[Chart]:
    """Return the charts of a report in the order of the page, those of optional features included."""
    found = list(CHARTS)
    for name in shown_features(tables):
        for chart, before in FEATURES[name].charts.items():
            places = [i for i, other in enumerate(found) if other.name == before]
            found.insert(
                places[0] + 1 if places else len(found), load(f"{name}.charts.{chart}:CHART")
            )
    return found


def sections(tables: SweepTables) -> list[tuple[str, Markup]]:
    """Return heading and HTML of each section of a report that an optional feature adds."""
    named = [
        (FEATURES[name].heading, f"{name}.{FEATURES[name].section}")
        for name in shown_features(tables)
    ]
    made = [(heading, load(place)(tables)) for heading, place in named if heading]
    return [(heading, body) for heading, body in made if body]


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
    for chart in charts_of(tables):
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
