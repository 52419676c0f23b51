"""Top-1 accuracy against speedup, and against the time to a target accuracy, over repetitions."""

from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart, Look, looks, mixed, settings
from vitsweep.results.record import Status
from vitsweep.tables.accuracy import BETTER, MARGIN, NO_WORSE
from vitsweep.tables.formatting import missing
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import Claim
from vitsweep.tables.sweep_tables import SweepTables

PANELS = {"speedup": "higher", "seconds_to_target": "lower"}
"""Column of the horizontal axis -> its better side."""
BAND: dict[str, Any] = {"color": style.GRID, "alpha": 0.6, "zorder": 0.5}
"""How the margin below the baseline is drawn."""


def table_of(tables: SweepTables) -> DataFrame:
    """Return the settings with their accuracies, where they were repeated and two were trained."""
    cells = tables.settings
    if "accuracy_claim" not in cells or mixed(cells):
        return NOTHING
    trained = cells["accuracy_top1"].notna() & cells["speedup"].notna()
    return cells if trained.sum() > 1 else NOTHING


def draw(table: DataFrame) -> Figure:
    """Draw settings of `tables.replicates`: the mean of each, with whiskers of what is claimed.

    A vertical whisker is the paired interval of the difference from the baseline, at the height of the
    baseline's mean: the interval of a setting by itself contains what all settings of a seed share.
    Filled: no less accurate than the baseline by more than the margin, or the baseline itself. The grey
    band is the margin below the baseline. A line joins the settings that no other beats in both axes. A
    setting of which a repetition diverged is a cross at the foot of the panel.
    """
    named = table.assign(series=settings(table), baseline_top1=_baseline_top1(table))
    styles = looks(named, named["series"])
    panels = [column for column in PANELS if _has(table, column)]
    meanings = _meanings()
    below = 0.2 * len(meanings) / max(len(panels), 1)  # inches of the lines below the panels
    height = max(4.0, 0.6 + 0.2 * len(table)) + below
    figure = style.empty_figure(4.4 * len(panels) + 3.2, height)
    # one scale of accuracy: the band is as wide in both panels
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, column in zip(all_axes, panels, strict=True):
        _panel(style.dress(axes), named, styles, column)
    all_axes[0].set_ylabel(f"{style.axis_label('accuracy_top1')} (%)")
    style.legend(all_axes[-1], "Setting")
    style.key(figure, meanings, columns=len(panels))
    return figure


def _has(table: DataFrame, column: str) -> bool:
    return column in table and bool((table[column].notna() & table["accuracy_top1"].notna()).any())


def _baseline_top1(table: DataFrame) -> Series:
    """Return the mean top-1 of each setting's baseline."""
    known = table.drop_duplicates("cell_id").set_index("cell_id")["accuracy_top1"]
    return table["baseline_cell_id"].map(known).astype(float)


def _panel(axes: Axes, table: DataFrame, styles: dict[str, Look], column: str) -> None:
    for _, row in table.iterrows():
        if not missing(row["accuracy_top1"]):
            _point(axes, row, styles[row["series"]], column)
    for _, row in table[table["accuracy_claim"] == str(Status.diverged)].iterrows():
        _cross(axes, row, styles[row["series"]], column)
    _front(axes, table, column)
    for level in table.loc[table["accuracy_claim"] == Claim.baseline, "accuracy_top1"].dropna():
        axes.axhspan(100 * (level - MARGIN), 100 * level, **BAND)
    axes.set_xlabel(style.axis_label(column))
    if column != "speedup":
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.margins(0.12)


def _point(axes: Axes, row: Series, look: Look, column: str) -> None:
    """Draw the mean of a setting with its whiskers; name it in the legend also where it has no place."""
    sure = row["accuracy_claim"] in (BETTER, NO_WORSE, Claim.baseline)
    at, top1 = row[column], 100 * row["accuracy_top1"]
    axes.plot(
        *(([], []) if missing(at) else ([at], [top1])), look.marker, label=row["series"],
        ms=7, mew=1.5, mec=look.colour, mfc=look.colour if sure else style.PAPER, zorder=2.1,
    )  # fmt: skip
    whisker: dict[str, Any] = {"fmt": "none", "color": look.colour, "linewidth": 1, "capsize": 2.5}
    if missing(at):
        return
    axes.errorbar(at, top1, xerr=_reach(row, column), **whisker)
    ends = _claimed_ends(row)
    # around its own middle: the mean may be over more repetitions than the pairs
    if ends is not None:
        low, high = ends
        axes.errorbar(at, 50 * (low + high), yerr=50 * (high - low), **whisker)


def _cross(axes: Axes, row: Series, look: Look, column: str) -> None:
    """Draw a cross at the foot of the panel, or in the legend only where no repetition has a place."""
    placed = not missing(row[column])
    axes.plot(
        *(([row[column]], [0.02]) if placed else ([], [])), "x", color=look.colour, ms=9, mew=2,
        transform=axes.get_xaxis_transform(), label=f"{row['series']}: diverged",
        clip_on=not placed,  # without a place and without clipping it would take the whole layout
    )  # fmt: skip


def _claimed_ends(row: Series) -> tuple[float, float] | None:
    """Return the ends of the paired interval as top-1; None where too few pairs have none."""
    low, high = row.get("accuracy_difference_low"), row.get("accuracy_difference_high")
    level = row["baseline_top1"]
    if row["accuracy_claim"] == Claim.baseline or missing(low) or missing(high) or missing(level):
        return None
    return float(level + low), float(level + high)


def _reach(row: Series, column: str) -> list[list[float]] | None:
    """Return how far an interval reaches to both sides; None where there is none."""
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    if missing(low) or missing(high):
        return None
    return [[max(row[column] - low, 0.0)], [max(high - row[column], 0.0)]]


def _meanings() -> list[Artist]:
    """Return what band, whiskers and markers mean, in no setting's colour."""
    points = f"{100 * MARGIN:g} points"
    grey: dict[str, Any] = {"color": style.QUIET, "marker": "o", "ls": "", "ms": 7, "mew": 1.5}
    whisker = grey | {"marker": "|", "ms": 13, "mew": 1}
    return [
        Patch(**BAND, label=f"within {points} below the baseline"),
        Line2D([], [], **whisker, label="difference from the baseline, 95 % at each end"),
        Line2D([], [], color=style.QUIET, lw=1, label="line: no other is better in both axes"),
        Line2D([], [], **grey, label=f"filled: shown to lose less than {points}, or the baseline"),
        Line2D([], [], **grey, mfc=style.PAPER, label="hollow: that is not shown"),
    ]


def _front(axes: Axes, table: DataFrame, column: str) -> None:
    """Join the settings that no other beats in accuracy and in the other axis."""
    known = table[table["accuracy_top1"].notna() & table[column].notna()]
    ordered = known.sort_values(column, ascending=PANELS[column] == "lower")
    best = ordered["accuracy_top1"].cummax()
    front = ordered[(ordered["accuracy_top1"] >= best) & ~best.duplicated()]
    axes.plot(
        front[column], 100 * front["accuracy_top1"], color=style.QUIET, linewidth=1, zorder=0.8
    )


CHART = Chart("Accuracy beside speed", table_of, draw, say("whiskers"))
