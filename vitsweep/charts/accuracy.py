"""Top-1 accuracy against speedup, and against the time to a target accuracy, over repetitions."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.series import Look, labels, looks
from vitsweep.results.record import Status
from vitsweep.tables.accuracy import MARGIN, NO_WORSE
from vitsweep.tables.formatting import missing

PANELS = {"speedup": "higher", "seconds_to_target": "lower"}
"""Column of the horizontal axis -> its better side."""


def draw(table: DataFrame) -> Figure:
    """Draw settings of `tables.replicates`: the mean of each with its intervals over repetitions.

    Filled: no less accurate than the baseline by more than the margin, or the baseline itself. The grey
    band is the margin below the baseline. A line joins the settings that no other beats in both axes. A
    setting of which a repetition diverged is a cross at the foot of the panel.
    """
    named, styles = table.assign(series=labels(table)), looks(table)
    panels = [column for column in PANELS if _has(table, column)]
    figure = style.empty_figure(4.4 * len(panels) + 3.2, 4.2)
    for axes, column in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _panel(style.dress(axes), named, styles, column)
    style.legend(figure.axes[-1], "Setting")
    return figure


def _has(table: DataFrame, column: str) -> bool:
    return column in table and bool((table[column].notna() & table["accuracy_top1"].notna()).any())


def _panel(axes: Axes, table: DataFrame, styles: dict[str, Look], column: str) -> None:
    for _, row in table.iterrows():
        if missing(row["accuracy_top1"]):
            continue
        look = styles[row["series"]]
        sure = row["accuracy_claim"] in (NO_WORSE, "baseline")
        point: dict[str, Any] = {"mec": look.colour, "mfc": look.colour if sure else style.PAPER}
        if missing(row[column]):  # named in the legend all the same
            axes.plot([], [], look.marker, label=f"{row['series']}", ms=7, mew=1.5, **point)
            continue
        axes.errorbar(
            row[column],
            100 * row["accuracy_top1"],
            xerr=_reach(row, column, 1),
            yerr=_reach(row, "accuracy_top1", 100),
            fmt=look.marker,
            color=look.colour,
            ms=7,
            mew=1.5,
            linewidth=1,
            capsize=2.5,
            label=row["series"],
            **point,
        )
    for _, row in table[table["accuracy_claim"] == str(Status.diverged)].iterrows():
        at = 1.0 if missing(row[column]) else row[column]
        look = styles[row["series"]]
        axes.plot(
            at, 0.02, "x", color=look.colour, ms=9, mew=2, transform=axes.get_xaxis_transform(),
            label=f"{row['series']}: diverged", clip_on=False,
        )  # fmt: skip
    _front(axes, table, column)
    for level in table.loc[table["accuracy_claim"] == "baseline", "accuracy_top1"].dropna():
        axes.axhspan(100 * (level - MARGIN), 100 * level, color=style.GRID, alpha=0.6, zorder=0.5)
    axes.set(xlabel=style.axis_label(column), ylabel=f"{style.axis_label('accuracy_top1')} (%)")
    axes.margins(0.12)


def _reach(row: Series, column: str, factor: float) -> list[list[float]] | None:
    """Return how far an interval reaches to both sides; None where there is none."""
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    if missing(low) or missing(high):
        return None
    below, above = row[column] - low, high - row[column]
    return [[factor * max(below, 0.0)], [factor * max(above, 0.0)]]


def _front(axes: Axes, table: DataFrame, column: str) -> None:
    """Join the settings that no other beats in accuracy and in the other axis."""
    known = table[table["accuracy_top1"].notna() & table[column].notna()]
    ordered = known.sort_values(column, ascending=PANELS[column] == "lower")
    best = ordered["accuracy_top1"].cummax()
    front = ordered[(ordered["accuracy_top1"] >= best) & ~best.duplicated()]
    axes.plot(
        front[column], 100 * front["accuracy_top1"], color=style.QUIET, linewidth=1, zorder=0.8
    )
