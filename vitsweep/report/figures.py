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
    """Return the optional features of which these sweeps hold something, and those of every sweep."""
    found = {key for record in tables.records for key in record.samples}
    kept = {f.kept for f in FEATURES.values() if f.kept}
    found |= {file for store in tables.stores for file in kept if (store.root / file).exists()}
    asked = {name: {f.recorded, f.kept} - {""} for name, f in FEATURES.items()}
    return [name for name, keys in asked.items() if not keys or keys & found]


def charts_of(tables: SweepTables) -> list[Chart]:
    """Return the charts of a report in the order of the page, those of optional features included."""
    found = list(CHARTS)
    for name in shown_features(tables):
        for chart, before in FEATURES[name].charts.items():
            names = ["", *(other.name for other in found)]
            place = names.index(before) if before in names else len(found)
            found.insert(place, load(f"{name}.charts.{chart}:CHART"))
    return found


def sections(tables: SweepTables) -> list[tuple[str, Markup]]:
    """Return heading and HTML of each section of a report that an optional feature adds."""
    shown = [(name, FEATURES[name]) for name in shown_features(tables)]
    made = [(f.heading, load(f"{name}.{f.section}")(tables)) for name, f in shown if f.section]
    return [(heading, body) for heading, body in made if body]


def files_of(tables: SweepTables) -> list[tuple[str, str]]:
    """Return name and text of each file that an optional feature writes beside a report."""
    shown = [(n, *each) for n in shown_features(tables) for each in FEATURES[n].files.items()]
    made = [(file, load(f"{name}.{place}")(tables)) for name, file, place in shown]
    return [(file, text) for file, text in made if text]


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
