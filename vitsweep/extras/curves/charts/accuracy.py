"""Top-1 accuracy against speedup, and against the time to a target accuracy."""

from collections.abc import Hashable, Mapping
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import Chart, Look, looks, settings
from vitsweep.results.record import Status
from vitsweep.tables.accuracy import BETTER, MARGIN, NO_WORSE
from vitsweep.tables.formatting import missing
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import Claim

COLUMNS = ("speedup", "seconds_to_target")
"""Of the horizontal axes."""
BAND: dict[str, Any] = {"color": style.GRID, "alpha": 0.6, "zorder": 0.5}
"""How the margin below the baseline is drawn."""


def draw(table: DataFrame) -> Figure:
    """Draw settings of `tables.replicates`: the mean of each, with whiskers of what is claimed.

    A vertical whisker is the paired interval of the difference from the baseline, at the height of the
    baseline's mean: the interval of a setting by itself contains what all settings of a seed share.
    Filled: no less accurate than the baseline by more than the margin, or the baseline itself. The grey
    band is the margin below the baseline. A setting of which a repetition diverged is a cross.
    """
    tops = table.drop_duplicates("cell_id").set_index("cell_id")["accuracy_top1"]
    named = table.assign(
        series=settings(table), baseline_top1=table["baseline_cell_id"].map(tops).astype(float)
    )
    styles = looks(named, named["series"])
    panels = [
        c for c in COLUMNS if c in table and table[[c, "accuracy_top1"]].notna().all(axis=1).any()
    ]
    figure = style.empty_figure(4.8 * len(panels), 4.4 + 0.1 * len(table))
    # one scale of accuracy: the band is as wide in both panels
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axes, column in zip(all_axes, panels, strict=True):
        style.dress(axes)
        for row in named.to_dict("records"):
            _point(axes, row, styles[row["series"]], column)
        for level in table.loc[table["accuracy_claim"] == Claim.baseline, "accuracy_top1"].dropna():
            axes.axhspan(100 * (level - MARGIN), 100 * level, **BAND)
        axes.set_xlabel(style.axis_label(column))
        axes.margins(0.12)
    all_axes[0].set_ylabel(f"{style.axis_label('accuracy_top1')} (%)")
    shown = all_axes[-1].get_legend_handles_labels()
    meanings = _meanings()
    style.key(figure, [*shown[0], *meanings], [*shown[1], *(str(m.get_label()) for m in meanings)])
    return figure


def _point(axes: Axes, row: Mapping[Hashable, Any], look: Look, column: str) -> None:
    """Draw the mean of a setting with its whiskers; name it in the legend also where it is not drawn."""
    claim, at, top1 = row["accuracy_claim"], row[column], row["accuracy_top1"]
    is_diverged = claim == Status.diverged
    name = f"{row['series']}: diverged" if is_diverged else row["series"]
    face = look.colour if claim in (BETTER, NO_WORSE, Claim.baseline) else style.PAPER
    is_placed = not (missing(at) or missing(top1))
    axes.plot(
        *(([at], [100 * top1]) if is_placed else ([], [])), "x" if is_diverged else look.marker,
        label=name, ls="", ms=7, mew=1.5, mec=look.colour, mfc=face, zorder=2.1,
    )  # fmt: skip
    if not is_placed:
        return
    whisker: dict[str, Any] = {"fmt": "none", "color": look.colour, "linewidth": 1, "capsize": 2.5}
    low, high = row.get(f"{column}_low"), row.get(f"{column}_high")
    if not (missing(low) or missing(high)):
        reach = [[max(at - low, 0.0)], [max(high - at, 0.0)]]
        axes.errorbar(at, 100 * top1, xerr=reach, **whisker)
    ends = [row["baseline_top1"] + row[f"accuracy_difference_{end}"] for end in ("low", "high")]
    # around its own middle: the mean may be over more repetitions than the pairs
    if claim != Claim.baseline and not any(map(missing, ends)):
        axes.errorbar(at, 50 * sum(ends), yerr=50 * (ends[1] - ends[0]), **whisker)


def _meanings() -> list[Artist]:
    """Return what band, whiskers and markers mean, in no setting's colour."""
    points = f"{100 * MARGIN:g} points"
    grey: dict[str, Any] = {"color": style.QUIET, "marker": "o", "ls": "", "ms": 7, "mew": 1.5}
    whisker = grey | {"marker": "|", "ms": 13, "mew": 1}
    return [
        Patch(**BAND, label=f"within {points} below the baseline"),
        Line2D([], [], **whisker, label="difference from the baseline, 95 % at each end"),
        Line2D([], [], **grey, label=f"filled: shown to lose less than {points}, or the baseline"),
        Line2D([], [], **grey, mfc=style.PAPER, label="hollow: that is not shown"),
    ]


CHART = Chart(
    "accuracy", "Accuracy against speed", draw, over_baseline=True, reading=say("whiskers"),
    needs=("accuracy_claim", "accuracy_top1", "speedup"), least=2, one_device=True,
)  # fmt: skip
