"""Hours of one ImageNet-1k epoch, the baseline in grey."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart, labels, looks
from vitsweep.tables import cost
from vitsweep.tables.formatting import number, plain
from vitsweep.tables.names import cell_names
from vitsweep.tables.stats import Claim
from vitsweep.tables.sweep_tables import SweepTables

MOST = 20


LARGE_IMAGE_PX = 128
"""Smallest images for which hours per ImageNet epoch are shown."""


def table_of(tables: SweepTables) -> DataFrame:
    """Return hours per epoch where images have the size of ImageNet's."""
    large = tables.settings[tables.settings["resolution_px"] >= LARGE_IMAGE_PX]
    return cost.epoch_hours(large) if len(large) > 1 else NOTHING


def draw(hours: DataFrame) -> Figure:
    """Draw the table of `tables.cost.epoch_hours`, the shortest epoch on top."""
    named = hours.assign(name=cell_names(hours), series=labels(hours))
    shown, colours = named.sort_values("epoch_hours").head(MOST), looks(hours)
    figure, axes = style.new_figure(8.0, style.height(len(shown)))
    ends = style.reach(shown["epoch_hours"], shown["epoch_hours_high"])
    for position, (_, row) in enumerate(shown.iterrows()):
        note = "  baseline" if plain(row.get("claim")) == Claim.baseline else ""
        text, look = (
            f"{number(row['epoch_hours'])} h{note}",
            {"color": colours[row["series"]].colour},
        )
        whisker = row["epoch_hours_low"], row["epoch_hours_high"]
        style.bar(axes, position, row["epoch_hours"], text, look, whisker, ends)
    style.rows(axes, shown["name"].tolist(), ends * 1.05)
    axes.set_xlabel(style.axis_label("epoch_hours_imagenet1k"))
    return figure


CHART = Chart("Hours per ImageNet-1k epoch of 1,281,167 images", table_of, draw)
