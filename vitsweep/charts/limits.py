"""The largest value of a setting that trains: one bar per row of the table of limits."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart
from vitsweep.tables import limits as limits_table
from vitsweep.tables.formatting import missing, plain
from vitsweep.tables.limits import limit_names, named
from vitsweep.tables.sweep_tables import SweepTables

MOST = 30


def table_of(tables: SweepTables) -> DataFrame:
    """Return the table of limits, where the sweep searched for one."""
    if not tables.limit_key:
        return NOTHING
    table = limits_table.limits(tables.settings, tables.limit_key)
    table.attrs["key"] = tables.limit_key
    return table


def draw(table: DataFrame) -> Figure:
    """Draw the table of `tables.limits`; an x marks the smallest value that ran out of memory."""
    key = str(table.attrs["key"])
    names = named(table)
    shown = table.head(MOST)
    figure, axes = style.new_figure(8.4, style.height(len(shown)))
    group = names[0] if names else "sharding"
    for position, (_, row) in enumerate(shown.iterrows()):
        hue = style.colour(group, plain(row.get(group)))
        axes.barh(position, row["fits"], height=style.BAR, color=hue)
        end = row["fits"]
        if not missing(row["fails_at"]):
            axes.plot([row["fails_at"]], [position], "x", color=style.INK, ms=7, mew=1.8)
            end = 1.01 * max(row["fits"], row["fails_at"])  # behind the x
        style.value(axes, position, float(end), f"{row['fits']:,}" if row["fits"] else "none fits")
    if shown["fails_at"].notna().any():
        axes.plot([], [], "x", color=style.INK, ms=7, mew=1.8, linestyle="", label="out of memory")
    furthest = shown[["fits", "fails_at"]].astype(float).max().max()
    style.rows(axes, limit_names(shown), float(furthest))
    axes.set_xlabel(f"Largest {key} that trains")
    style.legend_below(axes)
    return figure


CHART = Chart("How far each goes", table_of, draw)
