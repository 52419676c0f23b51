"""The speedup over the baseline at each number of ranks, as bars per world size."""

from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import scaling
from vitsweep.charts.style import NOTHING, Bars, Chart, fastest, labels, looks
from vitsweep.tables.formatting import BASELINE, count, missing, number, ratio
from vitsweep.tables.sweep_tables import SweepTables


def table_of(tables: SweepTables) -> DataFrame:
    """Return the scaling curves where there are several to compare."""
    table = scaling.table_of(tables)
    return table if len(table) and labels(table).nunique() > 1 else NOTHING


def draw(curves: DataFrame) -> Figure:
    """Draw throughput per rank by number of ranks, baseline in grey, speedup over it in words.

    Takes one kind of scaling from the table of `tables.scaling`: weak where there is one.
    """
    kind = "weak" if (curves["scaling"] == "weak").any() else "strong"
    some, _ = fastest(curves[curves["scaling"] == kind])
    some = some.assign(series=labels(some)).sort_values("world_size", kind="stable")
    styles = looks(some)
    bars = Bars(
        column="images_per_second_per_rank", note=_note, colour=lambda row: styles[row["series"]].colour,
        sure=lambda row: not missing(row["efficiency"]),
    )  # fmt: skip
    ranks = some["world_size"].map(lambda n: count(n, "rank"))
    return bars.draw(some, (ranks + " · " + some["series"]).tolist(), 8.8)


def _note(row: Series) -> str:
    rate = f"{number(row['images_per_second_per_rank'])} img/s"
    size = ratio(row["speedup"], row["speedup_low"], row["speedup_high"])
    return rate if row["claim"] == BASELINE or not size else f"{rate}, {size}"


CHART = Chart("Speedup by number of ranks", table_of, draw, scaling.hollow)
