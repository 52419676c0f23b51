"""Hours of one ImageNet-1k epoch, the baseline in grey."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Bars, Chart, first_group
from vitsweep.tables import cost
from vitsweep.tables.formatting import number
from vitsweep.tables.names import cell_names
from vitsweep.tables.published import with_published
from vitsweep.tables.sweep_tables import SweepTables

MOST = 20


LARGE_IMAGE_PX = 128
"""Smallest images for which hours per ImageNet epoch are shown."""


def table_of(tables: SweepTables) -> DataFrame:
    """Return hours per epoch where images have the size of ImageNet's."""
    large = tables.settings[tables.settings["resolution_px"] >= LARGE_IMAGE_PX]
    if len(large) < 2:
        return NOTHING
    return with_published(cost.epoch_hours(large), tables.published, "epoch_hours_imagenet1k")


def draw(hours: DataFrame) -> Figure:
    """Draw the table of `tables.cost.epoch_hours`, the shortest epoch on top."""
    shown = hours.sort_values("epoch_hours").head(MOST)
    bars = Bars(
        column="epoch_hours", low="epoch_hours_low", high="epoch_hours_high", group=first_group(hours),
        label=style.axis_label("epoch_hours_imagenet1k"), note=lambda row: f"{number(row['epoch_hours'])} h",
        mark="published",
    )  # fmt: skip
    return bars.draw(shown, cell_names(hours)[shown.index].tolist())


CHART = Chart("Hours per ImageNet-1k epoch of 1,281,167 images", table_of, draw)
