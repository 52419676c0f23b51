"""Top-1 accuracy over a training: against its seconds and against its epochs, a line per setting."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart, Look, fastest, looks, mixed, settings
from vitsweep.tables.accuracy import mean_curve, training_curves
from vitsweep.tables.sweep_tables import SweepTables

PANELS = {"seconds": style.axis_label("train_seconds"), "epoch": "Epochs trained"}
"""Column of the horizontal axis -> its label."""
TARGET_LINE = (0, (4, 3))
GAP = {"wspace": 0.05}
"""Keeps the last label of one panel from the first of the next."""
MOST_MARKERS = 12
"""A line of more evaluations has a marker at some of them only."""


def table_of(tables: SweepTables) -> DataFrame:
    """Return the trained cells with their curves; seconds of two kinds of device have no mean."""
    if tables.evaluations.empty or mixed(tables.settings):
        return NOTHING
    table = training_curves(tables.settings, tables.runs, tables.evaluations)
    return table if table["curves"].map(bool).any() else NOTHING


def draw(table: DataFrame) -> Figure:
    """Draw the table of `tables.accuracy.training_curves`: the mean of each setting, single trainings thin.

    A setting of which every repetition diverged is named in the legend only.
    """
    shown, cut = fastest(table.assign(series=settings(table)), series=settings(table))
    styles = looks(shown, shown["series"])
    figure = style.empty_figure(12.0, 4.4)
    panels = list(map(style.dress, figure.subplots(1, 2, sharey=True, gridspec_kw=GAP)))
    for axes, column in zip(panels, PANELS, strict=True):
        for name, rows in shown.groupby("series", sort=False):
            _setting(axes, rows, column, styles[str(name)])
        _key(axes, shown)
        _frame(axes, column)
    panels[0].set_ylabel(f"{style.axis_label('accuracy_top1')} on held-out images (%)")
    style.legend(panels[1], cut)
    return figure


def _setting(axes: Axes, rows: DataFrame, column: str, look: Look) -> None:
    """Draw the trainings of one setting and their mean; a cross in the legend where none ended well."""
    mean = mean_curve(rows["curves"].tolist())
    runs = [run for curves in rows["curves"] for run in curves]
    for run in runs if len(runs) > 1 else []:
        axes.plot(
            run[column], 100 * run["accuracy_top1"],
            color=look.colour, linewidth=0.8, alpha=0.45, zorder=1.5,
        )  # fmt: skip
    axes.plot(
        mean[column],
        100 * mean["accuracy_top1"],
        color=look.colour,
        marker=look.marker if runs else "x",
        linestyle=look.line if runs else "",
        markevery=-(-len(mean) // MOST_MARKERS) or 1,
        ms=6,
        linewidth=1.8,
        label=_label(rows),
    )


def _label(rows: DataFrame) -> str:
    """Return the name of a setting, and how many of its repetitions are no part of the mean."""
    [name] = style.shorten(rows["series"].iloc[:1])
    lost, every = int(rows["diverged"].sum()), len(rows)
    if not lost:
        return name
    return f"{name}: diverged" if lost == every else f"{name}: {lost} of {every} diverged"


def _key(axes: Axes, table: DataFrame) -> None:
    """Draw the line of each target accuracy, and explain the thin lines where there are any."""
    trainings = table.groupby("series")["curves"].agg(lambda curves: sum(map(len, curves)))
    if (trainings > 1).any():
        axes.plot([], [], color=style.QUIET, linewidth=0.8, label="thin: one training")
    if "task.target_accuracy" in table:
        for target in sorted(table["task.target_accuracy"].dropna().astype(float).unique()):
            axes.axhline(
                100 * target, color=style.INK, linewidth=1, linestyle=TARGET_LINE, zorder=0.9,
                label=f"target: {100 * target:g} %",
            )  # fmt: skip


def _frame(axes: Axes, column: str) -> None:
    """Begin at the start of the training, and label whole epochs or seconds."""
    axes.set_xlabel(PANELS[column])
    axes.set_xlim(left=0)
    whole = column == "epoch"
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=whole))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))


CHART = Chart("Accuracy over training", table_of, draw)
