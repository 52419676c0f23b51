"""What each technique brings on average over the other choices, and with each of them."""

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart
from vitsweep.tables.effects import BASELINE
from vitsweep.tables.formatting import times
from vitsweep.tables.sentences import say
from vitsweep.tables.sweep_tables import SweepTables

MOST = 24
"""Techniques that are drawn, those with the largest effects."""


def table_of(tables: SweepTables) -> DataFrame:
    """Return the effects of the techniques that were crossed: measured with several choices of another.

    With one other choice only, an average is the plain speedup, which has a chart of its own.
    """
    table = tables.effects
    given = table[(table["kind"] == "given") & table["effect"].notna()]
    other = given["given"].astype(str).str.split("=").str[0]
    counts = given[other != BASELINE].groupby(["technique", other]).size()
    crossed = set(counts.index[counts > 1].get_level_values("technique"))
    return table[table["technique"].isin(crossed)] if len(crossed) > 1 else NOTHING


def draw(table: DataFrame) -> Figure:
    """Draw the table of `tables.effects.effects`: filled is the average with its 95 % interval.

    Hollow marks are the effects together with one other choice; where one differs from the average
    at the 5 % level, the most different is named.
    """
    average = table[(table["kind"] == "average") & table["effect"].notna()]
    largest = average["effect"].astype(float).map(np.log).abs().nlargest(MOST).index
    shown = average.loc[largest].sort_values("effect", ascending=False)
    figure, axes = style.new_figure(8.8, style.height(len(shown)))
    furthest = 1.0
    for position, row in enumerate(shown.to_dict("records")):
        group, _, choice = str(row["technique"]).partition("=")
        colour = style.colour(group, choice)
        mine = (table["kind"] == "given") & (table["technique"] == row["technique"])
        given = table[mine & (table["device"] == row["device"]) & table["effect"].notna()]
        axes.plot(
            given["effect"], [position] * len(given), "D", ms=4.5, mfc="none", mec=colour, mew=1.0
        )
        style.whiskers(axes, position, row["effect"], row["effect_low"], row["effect_high"])
        axes.plot(row["effect"], position, "o", color=colour, ms=8, zorder=3)
        end = max(
            [row["effect"], *given["effect"], *([row["effect_high"]] * (row["effect_high"] > 0))]
        )
        furthest = max(furthest, end)
        style.value(axes, position, end, _text(row["effect"], given))
    labels = [f"{row['technique']}" for row in shown.to_dict("records")]
    style.rows(axes, labels, furthest)
    style.reference_line(axes, 1.0)
    lowest = min([1.0, *table.loc[table["effect"].notna(), "effect"]])
    axes.set_xlim(max(lowest - 0.08 * (furthest - lowest), 0), furthest + 0.7 * (furthest - lowest))
    axes.plot([], [], "o", color=style.QUIET, ms=8, label="Average")
    axes.plot(
        [], [], "D", mfc="none", color=style.QUIET, ls="none", ms=4.5, label="With one other choice"
    )
    axes.set_xlabel("Throughput over that of the baselines' choice (x)")
    style.legend(axes)
    return figure


def _text(average: float, given: DataFrame) -> str:
    """Return `1.31x; 1.02x with attention=sdpa_math`."""
    claimed = given[given["interaction"].isin(["more than on average", "less than on average"])]
    if claimed.empty:
        return times(average)
    gap = (claimed["ratio_to_average"].astype(float) - 1).abs()
    row = claimed.loc[[gap.idxmax()]].iloc[0]
    return f"{times(average)}; {times(row['effect'])} with {str(row['given']).partition('=')[2]}"


CHART = Chart("Techniques on average over the other choices", table_of, draw, say("whiskers"))
