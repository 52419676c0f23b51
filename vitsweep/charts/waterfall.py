"""The waterfall: each technique alone, and on top of those before it."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart, mixed
from vitsweep.tables.formatting import missing, plain, times
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
    """Draw the table of `tables.effects.waterfall`: left one at a time, right cumulative.

    A bar of the right side spans from the speedup before to the speedup after; its number is the
    gain over the row above. Hatched bars claim nothing. Only the first baseline is drawn.
    """
    first = steps[steps["baseline_cell_id"] == steps["baseline_cell_id"].iloc[0]]
    kinds = [k for k in ("alone", "cumulative") if (first["kind"] == k).any()]
    most = max((first["kind"] == k).sum() for k in kinds)
    figure = style.empty_figure(5.0 * len(kinds) + 0.4, style.height(int(most)))
    for place, kind in enumerate(kinds):
        axes = style.dress(figure.add_subplot(1, len(kinds), place + 1))
        rows = first[first["kind"] == kind].sort_values(
            "speedup" if kind == "alone" else "position", ascending=kind != "alone"
        )
        _bars(axes, rows, kind)
        style.title(axes, "One at a time" if kind == "alone" else "Cumulative")
        axes.set_xlabel(style.axis_label("speedup"))
    return figure


def _bars(axes: Axes, rows: DataFrame, kind: str) -> None:
    before, ends = 1.0, style.reach(rows["speedup"], rows["speedup_high"])
    for position, (_, row) in enumerate(rows.iterrows()):
        if missing(row["speedup"]):
            style.value(axes, position, 0.0, plain(row.get("status")).replace("_", " "))
            continue
        group, _, choice = plain(row["added"]).partition("=")
        hue = style.colour(group, choice) if choice else style.BASELINE
        claim = plain(row["claim"] if kind == "alone" else row["gain_claim"])
        look = style.fill(hue, claim in SURE)
        left = 0.0 if kind == "alone" or not choice else before
        axes.barh(position, row["speedup"] - left, left=left, height=style.BAR, **look)
        style.whiskers(axes, position, row["speedup"], row["speedup_low"], row["speedup_high"])
        end = max(x for x in (row["speedup"], row["speedup_high"], left) if not missing(x))
        end = min(end, ends)
        gain = times(row["gain"]) if kind == "cumulative" and choice else ""
        gain = f" ({gain})" if gain else ""
        style.value(axes, position, end, times(row["speedup"]) + gain)
        before = row["speedup"]
    names = [
        _name(row["added"], position, kind) for position, (_, row) in enumerate(rows.iterrows())
    ]
    style.rows(axes, names, ends * 1.08)
    style.reference_line(axes, 1.0)


def _name(added: str, position: int, kind: str) -> str:
    return f"+ {added}" if kind == "cumulative" and position else added


CHART = Chart(
    "Techniques alone and on top of each other",
    table_of,
    draw,
    f"{say('whiskers')} {say('hatched')}",
)
