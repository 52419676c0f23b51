"""Speedup over the baseline, one bar per cell, with its 95 % interval."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.spec.technique import TECHNIQUE_GROUPS
from vitsweep.tables.columns import varying
from vitsweep.tables.words import cell_label, missing, times

MOST = 30
"""Bars beyond it cannot be read; the table has them all."""


def draw(cells: DataFrame) -> Figure:
    """Draw the cells that have a speedup, the largest on top; hatched where nothing is claimed.

    Bars are coloured by the first technique that varies; the baseline is grey.
    """
    columns = varying(cells) or ["precision"]
    group = next((c for c in columns if c in TECHNIQUE_GROUPS), columns[0])
    shown = cells[cells["speedup"].notna()].sort_values("speedup", ascending=False).head(MOST)
    figure, axes = style.new_figure(8.4, 1.3 + 0.34 * max(len(shown), 2))
    for position, (_, row) in enumerate(shown.iterrows()):
        is_baseline = row["claim"] == "baseline"
        hue = style.BASELINE if is_baseline else style.colour(group, row[group])
        sure = row["claim"] in ("faster", "slower", "baseline")
        fill: dict[str, Any] = (
            {"color": hue} if sure else {"fc": style.PAPER, "ec": hue, "hatch": "////"}
        )
        axes.barh(position, row["speedup"], height=0.66, **fill)
        _interval(axes, position, row["speedup"], row["speedup_low"], row["speedup_high"])
        _value(axes, position, row["speedup"], row["speedup_high"], row["claim"])
    labels = [cell_label(row, columns) for _, row in shown.iterrows()]
    return _finish(figure, axes, labels, group, shown)


def _interval(axes: Axes, position: int, middle: float, low: float, high: float) -> None:
    if missing(low) or missing(high):
        return
    axes.errorbar(
        middle,
        position,
        xerr=[[middle - low], [high - middle]],
        color=style.INK,
        linewidth=1.2,
        capsize=3,
    )


def _value(axes: Axes, position: int, middle: float, high: float, claim: str) -> None:
    note = "" if claim in ("faster", "slower") else f"  {claim}"
    end = middle if missing(high) else high
    axes.annotate(
        times(middle) + note,
        (end, position),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=style.INK,
        bbox={"fc": style.PAPER, "ec": "none", "pad": 1},
    )


def _finish(figure: Figure, axes: Axes, labels: list[str], group: str, shown: DataFrame) -> Figure:
    axes.set_yticks(range(len(labels)), style.shorten(labels))
    axes.set_ylim(max(len(labels), 1) - 0.4, -0.6)
    axes.set_xlim(0, 1.18 * shown[["speedup", "speedup_high"]].max().max() if len(shown) else 1)
    axes.axvline(1, color=style.INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{style.axis_label('speedup')}, 95 % interval over blocks")
    others = shown[shown["claim"] != "baseline"]
    for choice in dict.fromkeys(others[group].astype(str)):
        axes.bar(0, 0, color=style.colour(group, choice), label=choice)
    style.legend(axes, group)
    return figure
