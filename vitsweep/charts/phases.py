"""Where a step's time goes: data, forward, backward, optimizer, stacked."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Bars, Chart
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
    shown = cells.dropna(subset=phases, how="all").sort_values("step_time_ms").head(MOST)
    bars = Bars(
        column="phases_ms", label=style.axis_label("step_time_ms"),
        parts={p: (style.PHASES[p], METRICS[p].label) for p in phases},
        mark="step_time_ms", marked="Timed step", note=lambda row: number(row["step_time_ms"]),
    )  # fmt: skip
    table = shown.assign(phases_ms=shown[phases].sum(axis=1))
    return bars.draw(table, cell_names(cells)[shown.index].tolist())


CHART = Chart("Where the step's time goes", table_of, draw)
