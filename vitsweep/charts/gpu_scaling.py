"""The speedup over the baseline at each number of ranks, as bars per world size."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import scaling, style
from vitsweep.charts.style import NOTHING, Chart, fastest, labels, looks
from vitsweep.tables.formatting import missing, number, plain, times
from vitsweep.tables.stats import Claim
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
    some, cut = fastest(curves[curves["scaling"] == kind])
    some = some.assign(series=labels(some))
    styles = looks(some)
    sizes, series = sorted(some["world_size"].unique()), list(dict.fromkeys(some["series"]))
    width = 0.8 / max(len(series), 1)
    figure, axes = style.new_figure(8.4, 4.0)
    for _, row in some.iterrows():
        place = (
            sizes.index(row["world_size"])
            + (series.index(row["series"]) - (len(series) - 1) / 2) * width
        )
        is_baseline = plain(row["claim"]) == Claim.baseline
        hue = styles[row["series"]].colour
        shared = missing(row["efficiency"])
        axes.bar(
            place, row["images_per_second_per_rank"], width * 0.92, **style.fill(hue, not shared)
        )
        text = number(row["images_per_second_per_rank"]) if is_baseline else times(row["speedup"])
        axes.annotate(
            text, (place, row["images_per_second_per_rank"]), xytext=(0, 3),
            textcoords="offset points", ha="center", fontsize=8.5, color=style.INK,
        )  # fmt: skip
    for name in series:
        hue = styles[name].colour
        axes.bar(0, 0, color=hue, label="baseline" if hue == style.BASELINE else name)
    axes.set_xticks(range(len(sizes)), [f"{n:g}" for n in sizes])
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="Ranks", ylabel=style.axis_label("images_per_second_per_rank"))
    axes.margins(y=0.12)
    style.legend(axes, cut)
    return figure


CHART = Chart("Speedup by number of ranks", table_of, draw, scaling.hollow)
