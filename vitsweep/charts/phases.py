"""Where a step's time goes: data, forward, backward, optimizer, stacked."""

from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart
from vitsweep.results.metrics import METRICS
from vitsweep.tables.formatting import number
from vitsweep.tables.names import cell_names
from vitsweep.tables.sweep_tables import SweepTables

PHASES = ("data_ms", "forward_ms", "backward_ms", "bubble_ms", "optimizer_ms")
MOST = 30


def table_of(tables: SweepTables) -> DataFrame:
    """Return the cells where any has a phase."""
    cells = tables.settings
    known = any(p in cells and cells[p].notna().any() for p in PHASES)
    return cells if known else NOTHING


def draw(cells: DataFrame) -> Figure:
    """Stack the phases of each measured cell, the shortest step on top.

    Phases come from instrumented steps of their own; the diamond is the timed step without
    instruments, which is shorter where phases overlap.
    """
    phases = [p for p in PHASES if p in cells and cells[p].notna().any()]
    shown = cells[cells[phases].notna().any(axis=1)] if phases else cells.iloc[:0]
    shown = shown.sort_values("step_time_ms").head(MOST)
    labels = cell_names(cells)[shown.index].tolist()
    figure, axes = style.new_figure(8.4, style.height(len(shown)))
    positions = range(len(shown))
    left = shown["step_time_ms"] * 0.0
    for phase in phases:
        width = shown[phase].fillna(0.0)
        look: dict[str, Any] = {"color": style.PHASES[phase], "label": METRICS[phase].label}
        axes.barh(positions, width, left=left, height=style.BAR, **look)
        left = left + width
    axes.plot(shown["step_time_ms"], positions, "D", color=style.INK, ms=4, label="Timed step")
    for position, (end, step) in enumerate(zip(left, shown["step_time_ms"], strict=True)):
        style.value(axes, position, max(end, step), number(step))
    style.rows(axes, labels, max([*left, *shown["step_time_ms"], 1e-9]))
    axes.set_xlabel(style.axis_label("step_time_ms"))
    style.legend_below(axes)
    return figure


CHART = Chart("Where the step's time goes", table_of, draw)
