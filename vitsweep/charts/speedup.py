"""Speedup over the baseline, one bar per cell, with its 95 % interval."""

from math import nan

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.chart import NOTHING, Chart
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.tables.formatting import missing, plain, times
from vitsweep.tables.names import cell_names, varying
from vitsweep.tables.stats import SHOWN, SURE, Claim
from vitsweep.tables.sweep_tables import SweepTables

MOST = 30
"""Bars beyond it cannot be read; the table has them all."""

HATCHED = "not shown among all cells"


def table_of(tables: SweepTables) -> DataFrame:
    """Return the cells where at least one is compared with another."""
    return tables.settings if tables.settings["speedup"].notna().sum() > 1 else NOTHING


def draw(cells: DataFrame) -> Figure:
    """Draw the cells that have a speedup, the largest on top; hatched where nothing is claimed.

    Bars are coloured by the first technique that varies; the baseline is grey.
    """
    columns, names = varying(cells) or ["precision"], cell_names(cells)
    group = next((c for c in columns if c in GROUPS), columns[0])
    shown = cells[cells["speedup"].notna()].sort_values("speedup", ascending=False).head(MOST)
    figure, axes = style.new_figure(8.4, style.height(len(shown)))
    ends, longest_note = style.reach(shown["speedup"], shown["speedup_high"]), 0
    for position, (_, row) in enumerate(shown.iterrows()):
        claim, high = plain(row["claim"]), row["speedup_high"]
        hue = style.BASELINE if claim == Claim.baseline else style.colour(group, row[group])
        sure = claim in SURE
        axes.barh(position, row["speedup"], height=style.BAR, **style.fill(hue, sure))
        style.whiskers(axes, position, row["speedup"], row["speedup_low"], high)
        note = "" if claim in (*SHOWN, Claim.no_difference_shown) else f"  {claim}"
        longest_note = max(longest_note, len(note))
        end = row["speedup"] if missing(high) else min(high, ends)
        style.value(axes, position, end, times(row["speedup"]) + note)
    others = shown[shown["claim"] != Claim.baseline]
    for choice in dict.fromkeys(others[group].astype(str)):
        axes.bar(0, 0, color=style.colour(group, choice), label=choice)
    if not shown["claim"].isin(SURE).all():
        axes.bar(nan, 0, label=HATCHED, **style.fill(style.QUIET, False))
    style.rows(axes, names[shown.index].tolist(), ends, longest_note)
    style.reference_line(axes, 1.0)
    over = "repetitions" if "replicated" in cells else "blocks"
    axes.set_xlabel(f"{style.axis_label('speedup')}, 95 % interval over {over}")
    style.legend(axes, group)
    return figure


CHART = Chart(
    "Speedup over the baseline",
    table_of,
    draw,
    "Whiskers: 95 % interval of the ratio over paired blocks. Hatched: no difference is claimed.",
)
