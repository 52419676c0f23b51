"""Strong and weak scaling: throughput against the ideal line, and efficiency, by number of ranks."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart, Look, fastest, labels, looks, mixed
from vitsweep.tables.formatting import count
from vitsweep.tables.sentences import say
from vitsweep.tables.sweep_tables import SweepTables

TITLES = {
    "strong": "Strong scaling: images of a step fixed",
    "weak": "Weak scaling: images of a rank fixed",
}


def table_of(tables: SweepTables) -> DataFrame:
    """Return the scaling curves, where all points ran on one kind of device."""
    if tables.settings["world_size"].nunique() < 2 or mixed(tables.settings):
        return NOTHING
    return tables.scaling


def draw(curves: DataFrame) -> Figure:
    """Draw the table of `tables.scaling`: one row of panels for strong, one for weak scaling.

    Hollow points have no efficiency, since more than the number of ranks differs; no line leads to them.
    A curve without two points that differ in nothing else has no ideal line.

    Args:
        curves: as `scaling_efficiency` returns them.
    """
    curves, cut = fastest(curves)
    kinds = [k for k in TITLES if (curves["scaling"] == k).any()]
    figure = style.empty_figure(9.6, 3.7 * max(len(kinds), 1))
    styles = looks(curves)
    for row, kind in enumerate(kinds):
        some = curves[curves["scaling"] == kind].assign(series=labels(curves))
        left = style.dress(figure.add_subplot(len(kinds), 2, 2 * row + 1))
        right = style.dress(figure.add_subplot(len(kinds), 2, 2 * row + 2))
        for _, points in some.groupby("curve", sort=False):
            name = f"{points['series'].iloc[0]}{_images(points, some)}"
            _line(left, points, "images_per_second", styles[points["series"].iloc[0]], name)
            _line(right, points, "efficiency", styles[points["series"].iloc[0]], name)
        _ideal(left, right, some)
        style.title(left, TITLES[kind])
        left.set(xlabel="Ranks", ylabel=style.axis_label("images_per_second"))
        top = max(1.1, 1.05 * float(some["efficiency"].max()))  # caches can make it more than 1
        right.set(xlabel="Ranks", ylabel="Scaling efficiency (1)", ylim=(0, top))
        style.legend(right, cut)
    return figure


def _images(points: DataFrame, all_points: DataFrame) -> str:
    """Name the batch where a series has several curves that differ in it."""
    strong = points["scaling"].iloc[0] == "strong"
    column, per = ("images_per_step", "step") if strong else ("images_per_rank", "rank")
    several = all_points.groupby("series")[column].nunique().max() > 1
    return f", {points[column].iloc[0]:g} img/{per}" if several else ""


def _line(axes: Axes, points: DataFrame, column: str, look: Look, name: str) -> None:
    shared = points["efficiency"].isna()
    joined = points[~shared]
    axes.plot(
        joined["world_size"],
        joined[column],
        color=look.colour,
        linestyle=look.line,
        linewidth=1.8,
        label=name,
    )
    for chosen, face in ((points[~shared], look.colour), (points[shared], style.PAPER)):
        marks: dict[str, Any] = {"ms": 6, "mec": look.colour, "mfc": face, "mew": 1.4}
        axes.plot(chosen["world_size"], chosen[column], look.marker, **marks)
    if column == "efficiency":
        known = points.dropna(subset=["efficiency_low", "efficiency_high"])
        ends = [
            (known[column] - known["efficiency_low"]).clip(lower=0),
            (known["efficiency_high"] - known[column]).clip(lower=0),
        ]
        axes.errorbar(
            known["world_size"], known[column], yerr=ends, fmt="none", color=look.colour, capsize=3
        )


def _ideal(left: Axes, right: Axes, points: DataFrame) -> None:
    sizes = sorted({*points["world_size"]})
    ideal: dict[str, Any] = {"color": style.QUIET, "linewidth": 1, "linestyle": (0, (1, 2))}
    compared = points[points["efficiency"].notna()]
    for _, curve in compared.groupby("curve", sort=False):
        if len(curve) < 2:
            continue
        per_rank = curve["images_per_second"].iloc[0] / curve["world_size"].iloc[0]
        left.plot(sizes, [per_rank * n for n in sizes], **ideal)
    right.axhline(1.0, **ideal, label="ideal")
    left.set_xscale("log", base=2)
    left.set_yscale("log", base=2)
    right.set_xscale("log", base=2)
    for axes in (left, right):
        axes.set_xticks(sizes, [f"{n:g}" for n in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(ScalarFormatter())


def hollow(curves: DataFrame) -> str:
    """Return what differs at the points of a table of curves that have no efficiency; empty for none."""
    without = curves[curves["efficiency"].isna()].sort_values("world_size")
    notes = without["efficiency_note"].groupby(without["world_size"]).unique()
    listed = "; ".join(f"at {count(n, 'rank')} {' or '.join(said)}" for n, said in notes.items())
    return say("hollow", listed=listed) if listed else ""


CHART = Chart(
    "Scaling", table_of, draw, lambda table: f"{say('whiskers')} {hollow(table)}".rstrip()
)
