"""Time of each class of a cell beside the bound of its FLOPs and bytes."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart
from vitsweep.extras.explain.bounds import TAKEN_OFF, Bounds, bounds, traced_cells
from vitsweep.extras.explain.causes import REST
from vitsweep.extras.explain.charts.causes import MOST_PANELS
from vitsweep.tables.formatting import missing, number
from vitsweep.tables.names import names_by_id
from vitsweep.tables.sweep_tables import SweepTables

BOUND, GAP = "#0072b2", "#e69f00"


def table_of(tables: SweepTables) -> DataFrame:
    """Return the classes of the traced cells with their bounds, where the device's rates are known."""
    names = names_by_id(tables.cells)
    traced = traced_cells(tables)[-MOST_PANELS:]
    return rows_of([bounds(tables, cell_id, names[cell_id]) for cell_id in traced])


def rows_of(found: Sequence[Bounds]) -> DataFrame:
    """Return the classes of several cells in one table; empty where no bound is known."""
    known = [one.causes.assign(cell=one.name, step_ms=one.step_ms) for one in found if one.rates]
    return pd.concat(known, ignore_index=True) if known else NOTHING


def draw(table: DataFrame) -> Figure:
    """Draw the table of `rows_of`: one panel per cell, one bar per class, its bound in blue."""
    return style.stacked([rows for _, rows in table.groupby("cell", sort=False)], _panel)


def _panel(axes: Axes, rows: DataFrame) -> None:
    for position, (_, row) in enumerate(rows.iterrows()):
        ms, bound = row["ms"], row["bound_ms"]
        is_bounded = not missing(bound)
        axes.barh(position, ms, height=style.BAR, color=GAP if is_bounded else style.BASELINE)
        text = f"{number(ms)} ms"
        if is_bounded:
            axes.barh(position, bound, height=0.5 * style.BAR, color=BOUND)
            text += f", at least {number(bound)}"
        style.whiskers(axes, position, ms, row["low"], row["high"])
        right = max(v for v in (0.0, ms, row["high"], bound) if not missing(v))
        style.value(axes, position, right, text)
    axes.axvline(0, color=style.INK, linewidth=1)
    style.rows(axes, rows["cause"].tolist(), 0.0)
    ends = rows[["ms", "low", "high", "bound_ms"]].to_numpy(float)
    least, most = min(0.0, np.nanmin(ends)), np.nanmax(ends)
    reach = most - least
    axes.set_xlim(least - 0.02 * reach, most + 0.35 * reach)  # room for the values
    style.title(axes, f"{rows['cell'].iloc[0]}: {number(rows['step_ms'].iloc[0])} ms a step")
    axes.set_xlabel(
        "Milliseconds a step (orange: spent; blue: its bound; grey: no work is counted)"
    )


CHART = Chart(
    "Time of each class beside the bound of its work",
    table_of,
    draw,
    "Milliseconds a step by class, with 95 % intervals over blocks. Blue: the shortest time in which this "
    "device can do the counted FLOPs or read the bytes. Grey: no work is counted; "
    f"`{TAKEN_OFF}` is what the profiler adds to the classes, `{REST}` the remainder of the untraced step.",
)
