"""The waterfall: each technique alone, and on top of those before it."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Bars, Chart, mixed
from vitsweep.tables.formatting import BASELINE, missing, plain, ratio, status_words
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import SURE
from vitsweep.tables.sweep_tables import SweepTables


def table_of(tables: SweepTables) -> DataFrame:
    """Return the waterfall where at least two techniques stand alone or on top of each other."""
    cells = tables.settings
    if mixed(cells) and any(mixed(group) for _, group in cells.groupby("baseline_cell_id")):
        return NOTHING
    table = tables.waterfall
    return table if table["speedup"].notna().sum() > 2 else NOTHING


def draw(steps: DataFrame) -> Figure:
    """Draw the table of `tables.effects.waterfall`: above one at a time, below cumulative.

    A cumulative bar spans from the speedup before to the speedup after; its note has the gain over the
    row above. Hatched bars claim nothing. Only the first baseline is drawn.
    """
    first = steps[steps["baseline_cell_id"] == steps["baseline_cell_id"].iloc[0]]
    alone = first[first["kind"] == "alone"].sort_values("speedup", ascending=False)
    added = first[first["kind"] == "cumulative"].sort_values("position")
    before = added["speedup"].shift().where(added["position"] > 0, 0.0).fillna(1.0)
    parts = [alone.assign(before=0.0), added.assign(before=before)]
    return style.stacked([part for part in parts if len(part)], _panel)


def _panel(axes: Axes, rows: DataFrame) -> None:
    is_alone = rows["kind"].iloc[0] == "alone"
    claim = "claim" if is_alone else "gain_claim"
    plus = "" if is_alone else "+ "
    names = [f"{plus * (name != BASELINE)}{name}" for name in rows["added"]]
    bars = Bars(
        column="speedup", low="speedup_low", high="speedup_high", start="before", note=_note,
        colour=_colour, sure=lambda row: plain(row[claim]) in SURE, reference=1.0,
    )  # fmt: skip
    bars.on(axes, rows, names)
    style.title(axes, "One at a time" if is_alone else "Cumulative")


def _colour(row: Series) -> str:
    group, _, choice = plain(row["added"]).partition("=")
    return style.colour(group, choice) if choice else style.BASELINE


def _note(row: Series) -> str:
    if missing(row["speedup"]):
        return status_words(row["status"])
    size = ratio(*row[["speedup", "speedup_low", "speedup_high", "claim"]])
    if row["kind"] == "alone" or not row["position"]:
        return size
    return f"{size}, gain {ratio(*row[['gain', 'gain_low', 'gain_high']])}"


CHART = Chart(
    "Techniques alone and on top of each other",
    table_of,
    draw,
    say("whiskers"),
)
