"""Marks that several charts share: horizontal bars with whiskers, values, and their frame."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from pandas import Series

from vitsweep.charts import style
from vitsweep.tables.formatting import missing

BAR = 0.66
WIDEST = 3.0
"""A whisker longer than so many of the longest bar leaves the chart: the bars must be seen."""


def whiskers(axes: Axes, position: float, middle: float, low: Any, high: Any) -> None:
    """Draw a horizontal interval; nothing where it is missing."""
    if not (missing(low) or missing(high)):
        ends = [[max(middle - low, 0)], [max(high - middle, 0)]]
        axes.errorbar(middle, position, xerr=ends, color=style.INK, linewidth=1.2, capsize=3)


def value(axes: Axes, position: float, end: float, text: str) -> None:
    """Write a value behind the end of a bar, readable over lines."""
    axes.annotate(
        text,
        (end, position),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=style.INK,
        bbox={"fc": style.PAPER, "ec": "none", "pad": 1},
    )


def rows(axes: Axes, labels: Sequence[str], limit: float, longest_note: int = 0) -> None:
    """Label the rows, first on top, and leave room at the right for the values.

    Args:
        axes: of the bars.
        labels: of the rows.
        limit: where the longest bar or whisker ends.
        longest_note: characters that follow a value.
    """
    axes.set_yticks(range(len(labels)), style.shorten(labels))
    axes.set_ylim(max(len(labels), 1) - 0.4, -0.6)
    room = 1.2 + 0.016 * longest_note
    axes.set_xlim(0, room * limit if limit > 0 else 1)
    axes.grid(axis="y", visible=False)


def reach(values: Series, highs: Series) -> float:
    """Return where the longest whisker ends, at most `WIDEST` times the longest bar; 1 for no bar."""
    if values.dropna().empty:
        return 1.0
    longest = float(values.max())
    return min(
        max(float(highs.max()), longest) if highs.notna().any() else longest, WIDEST * longest
    )


def reference_line(axes: Axes, at: float) -> None:
    """Draw the dashed line of the baseline behind the bars."""
    axes.axvline(at, color=style.INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)


def height(num_rows: int) -> float:
    """Return the height in inches of a chart with that many bars."""
    return 1.3 + 0.34 * max(num_rows, 2)


def fill(colour: str, sure: bool) -> dict[str, Any]:
    """Return how a bar is filled: hatched where nothing is claimed."""
    return {"color": colour} if sure else {"fc": style.PAPER, "ec": colour, "hatch": "////"}
