"""Who was in a race when: a line per cell, a mark per run."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart
from vitsweep.extras.race.table import Race, race_in, race_table
from vitsweep.tables.sweep_tables import SweepTables

MOST = 30
"""Cells that are drawn: those that stayed longest."""
COLOURS = {
    "leader": style.PALETTE[2],
    "runner-up": style.PALETTE[0],
    "out": style.OUT_OF_MEMORY,
}


def table_of(tables: SweepTables) -> DataFrame:
    """Return the cells of a race with the `blocks` in which each ran, from 0."""
    return history(race_in(tables))


def history(race: Race) -> DataFrame:
    """Return the table of a race with `blocks`; empty where a chart has nothing to show."""
    table = race_table(race)
    blocks = {cell["cell_id"]: cell["blocks"] for cell in race.get("cells", ())}
    drawn = len(table) > 1 and (table["runs"] > 0).any()
    return table.assign(blocks=table["cell_id"].map(blocks)) if drawn else NOTHING


def draw(table: DataFrame) -> Figure:
    """Draw the table of `race_table`, with each cell's `blocks`, from 0.

    A cell's line ends where it was dropped; dots are its runs.
    """
    shown = table[table["runs"] > 0].head(MOST)
    figure, axes = style.new_figure(8.8, style.height(len(shown)))
    for place, row in enumerate(shown.to_dict("records")):
        colour = COLOURS.get(row["state"], style.QUIET)
        axes.hlines(place, row["first_block"], row["last_block"], color=colour, linewidth=1.2)
        runs = [block + 1 for block in row["blocks"]]
        axes.plot(runs, [place] * len(runs), "o", color=colour, markersize=3.5)
        if row["state"] in ("dropped", "out"):
            axes.plot(row["last_block"], place, "|", color=colour, markersize=10, mew=2)
    axes.set_yticks(range(len(shown)), style.shorten(shown["name"]))
    axes.set_ylim(max(len(shown), 1) - 0.4, -0.6)
    axes.set_xlim(left=0.5)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("block of the race")
    return figure


CHART = Chart(
    "race",
    "Who was in the race when",
    table_of,
    draw,
    "A line for each cell from its first run to the block after which it was dropped; dots: its runs. "
    "Green: the leader at the end; blue: the runner-up; red: failed or left out.",
)
