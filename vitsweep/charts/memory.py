"""Peak memory of the worst rank, by sharding."""

from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts.style import NOTHING, Bars, Chart
from vitsweep.results.record import Status
from vitsweep.tables import cost
from vitsweep.tables.cost import with_peak
from vitsweep.tables.formatting import missing, number, plain
from vitsweep.tables.names import cell_names, in_menu_order
from vitsweep.tables.sweep_tables import SweepTables

MOST = 30


def table_of(tables: SweepTables) -> DataFrame:
    """Return the cells where peaks are known and more than one cell can be compared."""
    peaks = cost.with_peak(tables.settings)["peak_gib"].notna().sum()
    return tables.settings if peaks > 1 else NOTHING


def draw(cells: DataFrame) -> Figure:
    """Draw one bar per cell in groups of one sharding; a cell that ran out of memory says so."""
    wanted = (Status.measured, Status.out_of_memory)
    table = with_peak(cells[cells["status"].isin(wanted)]).assign(series=cell_names(cells))
    order = {c: i for i, c in enumerate(in_menu_order("sharding", cells["sharding"].map(plain)))}
    table = table.assign(_place=[order[s] for s in table["sharding"].map(plain)])
    shown = table.sort_values(["_place", "peak_gib"], ascending=[True, False]).head(MOST)
    bars = Bars(
        column="peak_gib", group="sharding", grey=False, note=_note,
        sure=lambda row: plain(row["status"]) != Status.out_of_memory,
    )  # fmt: skip
    return bars.draw(shown, shown["series"].tolist())


def _note(row: Series) -> str:
    peak = "" if missing(row["peak_gib"]) else f"{number(row['peak_gib'])} "
    return peak + "out of memory" * (plain(row["status"]) == Status.out_of_memory)


CHART = Chart("Peak memory", table_of, draw)
