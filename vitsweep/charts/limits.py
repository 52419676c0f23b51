"""The largest value of a setting that trains: one bar per row of the table of limits."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts.style import NOTHING, Bars, Chart
from vitsweep.tables import limits as limits_table
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
    """Draw the table of `tables.limits`; a hollow mark is the smallest value that ran out of memory."""
    shown, group = table.head(MOST), next(iter(named(table)), "sharding")
    bars = Bars(
        column="fits", label=f"Largest {table.attrs['key']} that trains", group=group, grey=False,
        mark="fails_at", marked="out of memory",
        note=lambda row: f"{row['fits']:,}" if row["fits"] else "none fits",
    )  # fmt: skip
    return bars.draw(shown.assign(**{group: shown.get(group)}), limit_names(shown))


CHART = Chart("How far each goes", table_of, draw)
