"""What each technique brings on average over the other choices, and with each of them."""

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Bars, Chart
from vitsweep.tables.effects import BASELINE
from vitsweep.tables.formatting import plain, ratio
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import SURE
from vitsweep.tables.sweep_tables import SweepTables

MOST = 24
"""Techniques that are drawn, those with the largest effects."""

KEY = ("technique", "device")


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
    """Draw the table of `tables.effects.effects`: bars are the averages with their 95 % intervals.

    Hollow marks are the effects together with one other choice; where one differs from the average
    at the 5 % level, the most different is named.
    """
    known = table[table["effect"].notna()]
    average, given = (known[known["kind"] == kind] for kind in ("average", "given"))
    largest = average["effect"].astype(float).map(np.log).abs().nlargest(MOST).index
    shown = average.loc[largest].sort_values("effect", ascending=False)
    of = {i: given[(given[[*KEY]] == row[[*KEY]]).all(axis=1)] for i, row in shown.iterrows()}
    bars = Bars(
        column="effect", low="effect_low", high="effect_high", reference=1.0,
        note=lambda row: _text(row, of[row.name]),
        label="Throughput over that of the baselines' choice (x)",
        mark="most", marked="With one other choice",
        colour=lambda row: style.colour(*str(row["technique"]).split("=", 1)),
        sure=lambda row: plain(row["claim"]) in SURE,
    )  # fmt: skip
    most = [of[place]["effect"].max() for place in shown.index]
    figure = bars.draw(shown.assign(most=most), shown["technique"].tolist(), 8.8)
    for at, place in enumerate(shown.index):
        figure.axes[0].plot(of[place]["effect"], [at] * len(of[place]), zorder=4, **style.HOLLOW)
    return figure


def _text(average: Series, given: DataFrame) -> str:
    """Return `1.31x [1.30, 1.32]; 1.02x [1.01, 1.03] with attention=sdpa_math`."""
    claimed = given[given["interaction"].isin(["more than on average", "less than on average"])]
    if claimed.empty:
        return _effect(average)
    gap = (claimed["ratio_to_average"].astype(float) - 1).abs()
    row = claimed.loc[[gap.idxmax()]].iloc[0]
    return f"{_effect(average)}; {_effect(row)} with {str(row['given']).partition('=')[2]}"


def _effect(row: Series) -> str:
    return ratio(row["effect"], row["effect_low"], row["effect_high"])


CHART = Chart("Techniques on average over the other choices", table_of, draw, say("whiskers"))
