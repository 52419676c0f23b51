"""Top-1 accuracy over a training: against its seconds and against its epochs, a line per setting."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart, Look, fastest, looks, settings
from vitsweep.results.record import Status
from vitsweep.tables.accuracy import POINT
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import final_status, valid_runs

PANELS = {"seconds": style.axis_label("train_seconds"), "epoch": "Epochs trained"}
"""Column of the horizontal axis -> its label."""
MOST_MARKERS = 12
"""A line of more evaluations has a marker at some of them only."""


def curves_of(tables: SweepTables) -> DataFrame:
    """Return the trained cells with their curves."""
    if tables.evaluations.empty:
        return NOTHING
    table = training_curves(tables.settings, tables.runs, tables.evaluations)
    return table if table["curves"].map(bool).any() else NOTHING


def draw(table: DataFrame) -> Figure:
    """Draw the table of `training_curves`: the mean of each setting, single trainings thin.

    A setting of which every repetition diverged is named in the legend only.
    """
    shown, cut = fastest(table.assign(series=settings(table)), series=settings(table))
    styles = looks(shown, shown["series"])
    figure = style.empty_figure(10.0, 4.6)
    panels = list(map(style.dress, figure.subplots(1, 2, sharey=True)))
    for axes, column in zip(panels, PANELS, strict=True):
        for name, rows in shown.groupby("series", sort=False):
            _training(axes, rows, column, styles[str(name)])
        _key(axes, shown)
        axes.set_xlabel(PANELS[column])
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=column == "epoch"))
    panels[0].set_ylabel(f"{style.axis_label('accuracy_top1')} on held-out images (%)")
    style.legend(panels[1], cut)
    return figure


def _training(axes: Axes, rows: DataFrame, column: str, look: Look) -> None:
    """Draw the trainings of one setting and their mean; a cross in the legend where none ended well."""
    mean = mean_curve(rows["curves"].tolist())
    runs = [run for curves in rows["curves"] for run in curves]
    for run in runs if len(runs) > 1 else []:
        thin: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.45, "zorder": 1.5}
        axes.plot(run[column], 100 * run["accuracy_top1"], color=look.colour, **thin)
    [name] = style.shorten(rows["series"].iloc[:1], 56)
    if lost := int(rows["diverged"].sum()):
        name += ": diverged" if lost == len(rows) else f": {lost} of {len(rows)} diverged"
    axes.plot(
        mean[column], 100 * mean["accuracy_top1"], color=look.colour, linewidth=1.8, ms=6, label=name,
        marker=look.marker if runs else "x", linestyle=look.line if runs else "",
        markevery=-(-len(mean) // MOST_MARKERS) or 1,
    )  # fmt: skip


def _key(axes: Axes, table: DataFrame) -> None:
    """Draw the line of each target accuracy, and explain the thin lines where there are any."""
    trainings = table.groupby("series")["curves"].agg(lambda curves: sum(map(len, curves)))
    if (trainings > 1).any():
        axes.plot([], [], color=style.QUIET, linewidth=0.8, label="thin: one training")
    targets = table.get("task.target_accuracy", Series(dtype=float)).dropna().astype(float)
    for target in sorted(targets.unique()):
        look: dict[str, Any] = {"color": style.INK, "linewidth": 1, "linestyle": (0, (4, 3))}
        axes.axhline(100 * target, zorder=0.9, label=f"target: {100 * target:g} %", **look)


def training_curves(cells: DataFrame, runs: DataFrame, evaluations: DataFrame) -> DataFrame:
    """Return one row per trained cell, and per cell that diverged, with its curves.

    Args:
        cells: one row per cell, or per setting over its repetitions (`tables.replicates`): such a row
            appears once for each repetition.
        runs: one row per run; only the curves of those that count are kept.
        evaluations: as `evaluations_of` returns them.

    Returns:
        The columns of `cells`, and `curves`: for each run of the cell a table `POINT`; `diverged`:
        whether the loss of this very cell became inf or NaN.
    """
    ids = cells["cell_ids"].str.split(",") if "cell_ids" in cells else cells["cell_id"]
    table = cells.assign(trained_cell=ids).explode("trained_cell", ignore_index=True)
    status = final_status(runs).set_index("cell_id")["status"]
    known = evaluations[evaluations["run_id"].isin(valid_runs(runs)["run_id"])]
    curves: dict[tuple[str, str], list[DataFrame]] = {}
    for (sweep, cell, _), points in known.groupby(["sweep", "cell_id", "run_id"], sort=False):
        curves.setdefault((str(sweep), str(cell)), []).append(points[list(POINT)].astype(float))
    keys = zip(table["sweep"].astype(str), table["trained_cell"].astype(str), strict=True)
    table = table.assign(
        curves=Series([curves.get(key, []) for key in keys], table.index, dtype=object),
        diverged=table["trained_cell"].map(status) == Status.diverged,
    )
    return table[table["curves"].map(bool) | table["diverged"]]


def mean_curve(cells: Sequence[Sequence[DataFrame]]) -> DataFrame:
    """Return the mean curve over repetitions: `POINT`, at the epochs that every repetition evaluated.

    A mean over other repetitions at every epoch would move without any training having moved.

    Args:
        cells: for each repetition the curves of its runs, which count as one.
    """
    of_cells = [pd.concat(runs).groupby("epoch").mean() for runs in cells if runs]
    if not of_cells:
        return DataFrame(columns=list(POINT))
    by_epoch = pd.concat(of_cells).groupby("epoch")
    return by_epoch.mean()[by_epoch.size() == len(of_cells)].reset_index()


CHART = Chart(
    "training_curves", "Accuracy over training", draw, table=curves_of,
    needs=("accuracy_top1",), one_device=True,  # seconds of two kinds of device have no mean
)  # fmt: skip
