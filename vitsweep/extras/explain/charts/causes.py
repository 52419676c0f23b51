"""Why a cell is faster or slower than another: the measured difference, cause by cause."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.bars import Bars, stacked
from vitsweep.charts.style import NOTHING, Chart
from vitsweep.extras.explain.causes import REST, TRACING, Explanation, explanations, signed
from vitsweep.tables.formatting import missing, number
from vitsweep.tables.sentences import say
from vitsweep.tables.sweep_tables import SweepTables

FASTER, SLOWER = "#009e73", "#d55e00"
MOST_PANELS = 4
SMALLEST = 0.01
"""Causes below this share of the longest bar, of which no difference is shown, are drawn as one."""
SMALL = "all smaller ones"


def table_of(tables: SweepTables) -> DataFrame:
    """Return the causes of the traced cells against their baselines, latest first."""
    found = explanations(tables)[-MOST_PANELS:]
    return rows_of(found) if found else NOTHING


def rows_of(found: Sequence[Explanation]) -> DataFrame:
    """Return the causes of several pairs in one table, with the measured difference of each."""
    return pd.concat([_rows(one) for one in found], ignore_index=True)


def _rows(found: Explanation) -> DataFrame:
    """Return the rows of a panel: the difference, the causes by size, tracing and rest."""
    causes = found.causes
    is_last = causes["cause"].isin([TRACING, REST])
    longest = causes["ms"].abs().max()
    is_small = ~is_last & ~causes["shown"] & (causes["ms"].abs() < SMALLEST * longest)
    large = causes[~is_last & ~is_small].sort_values("ms", key=abs, ascending=False)
    small = causes[is_small]
    parts = [DataFrame([found.total]), large]
    if len(small):
        pooled = {"cause": SMALL, "ms": small["ms"].sum(), "shown": False}
        parts.append(DataFrame([pooled]))
    parts.append(causes[is_last].drop(columns=["a_ms", "b_ms"]))
    whole = pd.concat(parts, ignore_index=True)
    return whole.assign(a=found.names[0], b=found.names[1])


def draw(table: DataFrame) -> Figure:
    """Draw the table of `rows_of`: one panel per pair, one bar per cause, to the left what is faster.

    Hatched bars are not shown to differ from 0; the bars below the line add up to the one above it.
    """
    return stacked([rows for _, rows in table.groupby(["a", "b"], sort=False)], _panel)


def _panel(axes: Axes, rows: DataFrame) -> None:
    a, b = str(rows.at[0, "a"]), str(rows.at[0, "b"])
    bars = Bars(
        column="ms", low="low", high="high", colour=_colour, note=_note,
        label="Milliseconds a step", sure=lambda row: bool(row["shown"]), reference=0.0,
    )  # fmt: skip
    bars.on(axes, rows, rows["cause"].tolist())
    axes.axhline(0.5, color=style.QUIET, linewidth=0.8)
    axes.get_yticklabels()[0].set_fontweight("bold")
    axes.set_ylim(len(rows) - 0.4, -0.95)
    ends = rows[["ms", "low", "high"]].to_numpy(float)
    reach = max(float(np.nanmax(np.abs(ends))), 1e-9)
    least, most = min(0.0, np.nanmin(ends)), max(0.0, np.nanmax(ends))
    axes.set_xlim(least - 0.1 * reach, most + 0.7 * reach)  # room for the values
    for side, text in (("right", f"← {a} takes less "), ("left", f" {a} takes more →")):
        axes.text(0, -0.65, text, ha=side, va="center", fontsize=8.5, color=style.QUIET)
    style.title(axes, f"{a} against {b}")


def _colour(row: pd.Series) -> str:
    hue = FASTER if row["ms"] < 0 else SLOWER
    return style.BASELINE if row["cause"] in (TRACING, REST, SMALL) else hue


def _note(row: pd.Series) -> str:
    known = not missing(row["a_ms"]) and max(row["a_ms"], row["b_ms"]) > 0
    spent = f"   {number(row['b_ms'])} → {number(row['a_ms'])} ms" if known else ""
    return f"{signed(row['ms'])}{spent}"


CHART = Chart(
    "causes", "Why: the difference, cause by cause", draw, table=table_of, reading=say("whiskers")
)
