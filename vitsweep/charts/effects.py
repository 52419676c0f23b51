"""What each technique brings on average over the other choices, and with each of them."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.bars import ROUND, Bars, stacked
from vitsweep.charts.style import NOTHING, Chart, mixed
from vitsweep.tables.effects import BASELINE
from vitsweep.tables.formatting import missing, plain, ratio, status_words
from vitsweep.tables.names import short
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import SURE
from vitsweep.tables.sweep_tables import SweepTables

MOST = 24
"""Techniques that are drawn, those with the largest effects."""

KEY = ("technique", "device")


def table_of(tables: SweepTables) -> DataFrame:
    """Return the effects of the techniques that were crossed: measured with several choices of another.

    With one other choice only, an average is the speedup, which has a chart of its own.
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
        sure=lambda row: plain(row["claim"]) in SURE, hatched="hatched: not significant",
    )  # fmt: skip
    most = [of[place]["effect"].max() for place in shown.index]
    figure = bars.draw(shown.assign(most=most), [*map(short, shown["technique"])], 8.8)
    for at, place in enumerate(shown.index):
        figure.axes[0].plot(of[place]["effect"], [at] * len(of[place]), zorder=4, **ROUND)
    return figure


def _text(average: Series, given: DataFrame) -> str:
    """Return `1.31x [1.30, 1.32]; 1.02x [1.01, 1.03] with attention=sdpa_math`."""
    claimed = given[given["interaction"].isin(["more than on average", "less than on average"])]
    if claimed.empty:
        return f"{_effect(average)}{_timed(average)}"
    gap = (claimed["ratio_to_average"].astype(float) - 1).abs()
    row = claimed.loc[[gap.idxmax()]].iloc[0]
    together = f"{_effect(row)} with {short(str(row['given']))}"
    return f"{_effect(average)}; {together}{_timed(average)}"


def _effect(row: Series) -> str:
    return ratio(row["effect"], row["effect_low"], row["effect_high"])


EFFECTS = Chart(
    "effects", "Techniques on average over the other choices", draw, table=table_of, num_varied=2,
    over_baseline=True,
)  # fmt: skip

# The waterfall: each technique alone, and on top of those before it.


def steps_of(tables: SweepTables) -> DataFrame:
    """Return the first baseline's waterfall where two techniques stand alone or on top of each other."""
    cells = tables.settings
    if mixed(cells) and any(mixed(group) for _, group in cells.groupby("baseline_cell_id")):
        return NOTHING
    table = tables.waterfall
    table = table[table["baseline_cell_id"].isin(table["baseline_cell_id"].head(1))]
    return table if table["speedup"].notna().sum() > 2 else NOTHING


def draw_steps(steps: DataFrame) -> Figure:
    """Draw the table of `tables.effects.waterfall`: above one at a time, below cumulative.

    A cumulative bar spans from the speedup before to the speedup after; its note has the gain over the
    row above. Hatched bars claim nothing. Only the first baseline is drawn.
    """
    first = steps[steps["baseline_cell_id"] == steps["baseline_cell_id"].iloc[0]]
    alone = first[first["kind"] == "alone"].sort_values("speedup", ascending=False)
    added = first[first["kind"] == "cumulative"].sort_values("position")
    before = added["speedup"].shift().where(added["position"] > 0, 0.0).fillna(1.0)
    colours = style.own_colours(name for name in first["added"] if name != BASELINE)
    parts = [alone.assign(before=0.0), added.assign(before=before)]
    drawn = [part.assign(colour=part["added"].map(colours)) for part in parts if len(part)]
    return stacked(drawn, _panel)


def _panel(axes: Axes, rows: DataFrame) -> None:
    is_alone = rows["kind"].iloc[0] == "alone"
    claim = "claim" if is_alone else "gain_claim"
    plus = "" if is_alone else "+ "
    names = [f"{plus * (name != BASELINE)}{short(name)}" for name in rows["added"]]
    bars = Bars(
        column="speedup", low="speedup_low", high="speedup_high", start="before", note=_step_note,
        colour=lambda row: plain(row["colour"]) or style.BASELINE,
        sure=lambda row: plain(row[claim]) in SURE, reference=1.0,
    )  # fmt: skip
    bars.on(axes, rows, names)
    style.title(axes, "One at a time" if is_alone else "Cumulative")


def _step_note(row: Series) -> str:
    if missing(row["speedup"]):
        return status_words(row["status"])
    size = ratio(*row[["speedup", "speedup_low", "speedup_high", "claim"]])
    gain = ratio(*row[["gain", "gain_low", "gain_high"]])
    told = f", gain {gain}" if gain and row["kind"] != "alone" and row["position"] else ""
    return f"{size}{told}{_timed(row)}"


def _timed(row: Series) -> str:
    return f"\n{timed}" if (timed := plain(row["timed"])) else ""


WATERFALL = Chart(
    "waterfall", "Techniques alone and on top of each other", draw_steps, table=steps_of, over_baseline=True,
    reading=say("whiskers"), num_varied=2,  # of one the bars of the speedup say the same
)  # fmt: skip
