"""Throughput against peak memory, with the Pareto front; accuracy counts where it was measured."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import Chart, labels, looks
from vitsweep.results.record import Status
from vitsweep.tables.formatting import percent
from vitsweep.tables.names import cell_names
from vitsweep.tables.valid_runs import checked_cells, one_device

SIGNS = {"images_per_second": 1.0, "peak_gib": -1.0, "accuracy_top1": 1.0}
"""Objectives -> 1 where more is better."""
MOST_NAMES = 15


def pareto_front(cells: DataFrame) -> DataFrame:
    """Return the measured cells with `on_front`: no other cell is better in one objective and worse in none.

    Objectives are throughput, peak memory and accuracy. Cells with an accuracy are compared with one another,
    and those without with one another in the other two: `objectives` names those of each row. A cell that
    lacks another objective is not on the front. The shown values are compared: noise is not counted.

    Args:
        cells: one row per cell.

    Raises:
        VitsweepError: the cells ran on different devices.
    """
    table = checked_cells(cells, *SIGNS)
    table = table[table["status"] == Status.measured].pipe(one_device)
    table = table.assign(on_front=False, objectives="")
    trained = table["accuracy_top1"].notna()
    for rows, own in ((table[trained], [*SIGNS]), (table[~trained], [*SIGNS][:2])):
        points = rows.reindex(columns=own).mul(Series(SIGNS)[own]).to_numpy(float)
        whole = ~np.isnan(points).any(axis=1)
        table.loc[rows.index[whole], "on_front"] = undominated(points[whole])
        table.loc[rows.index, "objectives"] = ", ".join(own)
    return table.sort_values("images_per_second", ascending=False)


def undominated(points: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which rows no other beats in one column without losing in another; larger is better."""
    more = points[None] - points[:, None]
    beaten = np.all(more >= 0, axis=2) & np.any(more > 0, axis=2)
    return np.logical_not(np.any(beaten, axis=1))


def draw(table: DataFrame) -> Figure:
    """Draw the table of `pareto_front`: filled points are on the front, and named."""
    # where a cell is compared with others that have one
    accuracy = ", top-1 " + table["accuracy_top1"].map(percent)
    named = table.assign(
        name=cell_names(table),
        series=labels(table),
        accuracy=accuracy.where(table["objectives"].str.contains("accuracy_top1"), ""),
    )
    styles = looks(table, named["series"])
    figure, axes = style.new_figure(8.8, 4.4)
    for _, row in named[~table["on_front"]].iterrows():
        look = styles[row["series"]]
        point: dict[str, Any] = {"mec": look.colour, "mfc": style.PAPER, "mew": 1.5, "ms": 6.5}
        axes.plot(row["peak_gib"], row["images_per_second"], look.marker, **point)
    front = named[table["on_front"]].sort_values("images_per_second", ascending=False)
    edge: dict[str, Any] = {"color": style.QUIET, "linewidth": 1, "zorder": 1}
    shown = front[
        front["objectives"].eq("images_per_second, peak_gib")
    ]  # as many as there are axes
    axes.step(shown["peak_gib"], shown["images_per_second"], where="pre", **edge)
    for number, (_, row) in enumerate(front.head(MOST_NAMES).iterrows(), start=1):
        look = styles[row["series"]]
        at = (row["peak_gib"], row["images_per_second"])
        axes.plot(
            *at,
            look.marker,
            color=look.colour,
            ms=8,
            ls="none",
            label=f"{number}  {row['name']}{row['accuracy']}",
        )
        axes.annotate(
            str(number), at, (7, 5), textcoords="offset points", fontsize=9, color=style.INK
        )
    axes.set(xlabel=style.axis_label("peak_gib"), ylabel=style.axis_label("images_per_second"))
    axes.margins(0.1)
    style.legend(axes, "On the front")
    return figure


CHART = Chart(
    "pareto", "Throughput, memory, accuracy", draw, table=lambda tables: pareto_front(tables.settings),
    needs=("images_per_second", "peak_gib"), least=3, one_device=True,
)  # fmt: skip
