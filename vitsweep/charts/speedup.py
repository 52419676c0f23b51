"""Speedup over the baseline, and hours of an epoch: one bar per cell, with its 95 % interval."""

from matplotlib.figure import Figure
from pandas import DataFrame, Series, concat

from vitsweep.charts import style
from vitsweep.charts.bars import Bars
from vitsweep.charts.style import NOTHING, Chart, first_group
from vitsweep.tables import cost
from vitsweep.tables.formatting import missing, number, plain, ratio
from vitsweep.tables.names import cell_names
from vitsweep.tables.published import with_published
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import SHOWN, SURE, Claim
from vitsweep.tables.sweep_tables import SweepTables

MOST = 30
"""Bars beyond it cannot be read; the table has them all."""


def table_of(tables: SweepTables) -> DataFrame:
    """Return the cells where at least one is compared with another."""
    if tables.settings["speedup"].notna().sum() < 2:
        return NOTHING
    return with_published(tables.settings, tables.published, "speedup")


def draw(cells: DataFrame) -> Figure:
    """Draw the cells that have a speedup, the largest on top; hatched where nothing is claimed.

    Bars are coloured by the first technique that varies; the baseline is grey.
    """
    shown = cells[cells["speedup"].notna()].sort_values("speedup", ascending=False).head(MOST)
    absent = cells.attrs.get("unmeasured", [])[:MOST]
    unmeasured = [
        {"published": at, "published_by": source, "claim": note, first_group(cells): ""}
        for _, at, note, source in absent
    ]
    names = [*cell_names(cells)[shown.index], *(name for name, *_ in absent)]
    over = "repetitions" if "replicated" in cells else "blocks"
    bars = Bars(
        column="speedup", low="speedup_low", high="speedup_high", group=first_group(cells), note=_note,
        sure=lambda row: plain(row["claim"]) in SURE, hatched="hatched: nothing is claimed",
        mark="published", reference=1.0, label=f"{style.axis_label('speedup')}, 95 % interval over {over}",
    )  # fmt: skip
    return bars.draw(
        concat([shown, DataFrame(unmeasured)], ignore_index=True) if unmeasured else shown, names
    )


def _note(row: Series) -> str:
    claim = plain(row["claim"])
    is_plain = claim in (*SHOWN, Claim.no_difference_shown, Claim.baseline)
    names = ("speedup", "speedup_low", "speedup_high", "claim")
    size = ratio(row["published"]) if missing(row["speedup"]) else ratio(*row[[*names]])
    return size + ("" if is_plain else f"  {claim}")


SPEEDUP = Chart("speedup", "Speedup over the baseline", table_of, draw, say("whiskers"))

LARGE_IMAGE_PX = 128
"""Smallest images for which hours per ImageNet epoch are shown."""
MOST_HOURS = 20


def hours_of(tables: SweepTables) -> DataFrame:
    """Return hours per epoch where images have the size of ImageNet's."""
    large = tables.settings[tables.settings["resolution_px"] >= LARGE_IMAGE_PX]
    if len(large) < 2:
        return NOTHING
    return with_published(cost.epoch_hours(large), tables.published, "epoch_hours_imagenet1k")


def draw_hours(hours: DataFrame) -> Figure:
    """Draw the table of `tables.cost.epoch_hours`, the shortest epoch on top."""
    shown = hours.sort_values("epoch_hours").head(MOST_HOURS)
    bars = Bars(
        column="epoch_hours", low="epoch_hours_low", high="epoch_hours_high", group=first_group(hours),
        label=style.axis_label("epoch_hours_imagenet1k"), note=lambda row: f"{number(row['epoch_hours'])} h",
        mark="published",
    )  # fmt: skip
    return bars.draw(shown, cell_names(hours)[shown.index].tolist())


EPOCH_HOURS = Chart(
    "epoch_hours", "Hours per ImageNet-1k epoch of 1,281,167 images", hours_of, draw_hours
)
