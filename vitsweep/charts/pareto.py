"""Throughput against peak memory, with the Pareto front."""

from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart, labels, looks, mixed
from vitsweep.tables import cost
from vitsweep.tables.formatting import missing, percent
from vitsweep.tables.names import cell_names
from vitsweep.tables.pareto import pareto_front
from vitsweep.tables.sweep_tables import SweepTables

MOST_NAMES, MOST_SURE = 15, 0.99


def table_of(tables: SweepTables) -> DataFrame:
    """Return the Pareto front where three cells of one device have throughput and memory."""
    if mixed(tables.settings):
        return NOTHING
    enough = cost.measured_with_peak(tables.settings)["peak_gib"].notna().sum() > 2
    return pareto_front(tables.settings, runs=tables.runs) if enough else NOTHING


def draw(table: DataFrame) -> Figure:
    """Draw the table of `tables.pareto.pareto_front`: filled points are on the front, and named.

    Where the table has `on_front_probability`, it stands behind the names, and the other points are
    filled as far as they may be on the front too.
    """
    named = table.assign(name=cell_names(table), series=labels(table))
    styles = looks(table, named["series"])
    figure, axes = style.new_figure(8.8, 4.4)
    for _, row in named[~table["on_front"]].iterrows():
        look = styles[row["series"]]
        point: dict[str, Any] = {"mec": look.colour, "mfc": style.PAPER, "mew": 1.5, "ms": 6.5}
        axes.plot(row["peak_gib"], row["images_per_second"], look.marker, **point)
        if (chance := _chance(row)) > 0:
            inside: dict[str, Any] = {"color": look.colour, "mew": 0, "ms": 6.5, "alpha": chance}
            axes.plot(row["peak_gib"], row["images_per_second"], look.marker, **inside)
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
            label=f"{number}  {row['name']}{_trained(row)}{_sureness(row)}",
        )
        axes.annotate(
            str(number), at, (7, 5), textcoords="offset points", fontsize=9, color=style.INK
        )
    axes.set(xlabel=style.axis_label("peak_gib"), ylabel=style.axis_label("images_per_second"))
    axes.margins(0.1)
    style.legend(axes, "On the front")
    return figure


def _chance(row: Series) -> float:
    """Return the probability of being on the front; 0 where it is not known."""
    chance: Any = row.get("on_front_probability")
    return 0.0 if missing(chance) else float(chance)


def _trained(row: Series) -> str:
    """Return the accuracy of a cell that is compared with others that have one."""
    return (
        f", top-1 {percent(row['accuracy_top1'])}" if "accuracy_top1" in row["objectives"] else ""
    )


def _sureness(row: Series) -> str:
    chance = min(_chance(row), MOST_SURE)  # as far as the draws can tell
    return f" ({'> ' * (chance == MOST_SURE)}{100 * chance:.0f} %)" if chance else ""


CHART = Chart("Throughput, memory, accuracy", table_of, draw)
