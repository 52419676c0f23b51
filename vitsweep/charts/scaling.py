"""Strong and weak scaling: throughput against the ideal line, and efficiency, by number of ranks."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, ScalarFormatter
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart, Look, fastest, labels, looks, mixed
from vitsweep.tables.formatting import count
from vitsweep.tables.sweep_tables import SweepTables

TITLES = {
    "strong": "Strong scaling: images of a step fixed",
    "weak": "Weak scaling: images of a rank fixed",
}


LAWS = {"amdahl": "Amdahl's law", "bytes": "constant + bytes / bandwidth"}
"""Names of the laws of `tables.scaling` that are drawn."""


def table_of(tables: SweepTables) -> DataFrame:
    """Return the scaling curves, where all points ran on one kind of device."""
    if tables.settings["world_size"].nunique() < 2 or mixed(tables.settings):
        return NOTHING
    table = tables.scaling.copy()
    fits = tables.predicted_scaling.to_dict("records")
    table.attrs["predicted"] = fits  # attributes are compared: no tables in them
    return table


def draw(curves: DataFrame, predicted: DataFrame | None = None) -> Figure:
    """Draw the table of `tables.scaling`: one row of panels for strong, one for weak scaling.

    Hollow points have no efficiency, since more than the number of ranks differs; no line leads to them.
    A curve without two points that differ in nothing else has no ideal line.

    Args:
        curves: as `scaling_efficiency` returns them.
        predicted: as `predicted_scaling` returns it: fits as dashed lines with 95 % bands that go on
            to worlds that were not measured.
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
        fits = _fits_of(predicted, some)
        for curve, fit in fits.groupby("curve", sort=False):
            look = styles[some.loc[some["curve"] == curve, "series"].iloc[0]]
            _fit(left, fit, "images_per_second", look)
            _fit(right, fit, "efficiency", look)
        _ideal(left, right, some, fits)
        style.title(left, TITLES[kind])
        left.set(xlabel="Ranks", ylabel=style.axis_label("images_per_second"))
        top = max(1.1, 1.05 * float(some["efficiency"].max()))  # caches can make it more than 1
        for law in dict.fromkeys(fits["law"]):
            name = f"fit: {LAWS[law]}"
            right.plot([], [], color=style.QUIET, linestyle=FIT_LINE, linewidth=1.4, label=name)
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


FIT_LINE = (0, (3, 3))


def _fits_of(predicted: DataFrame | None, points: DataFrame) -> DataFrame:
    """Return the fits of the curves that are drawn."""
    if predicted is None or predicted.empty:
        return DataFrame(columns=["curve", "law", "world_size"])
    return predicted[predicted["curve"].isin(set(points["curve"]))].sort_values("world_size")


def _fit(axes: Axes, fit: DataFrame, column: str, look: Look) -> None:
    sizes, middle = fit["world_size"].to_numpy(float), fit[column].to_numpy(float)
    axes.plot(sizes, middle, color=look.colour, linestyle=FIT_LINE, linewidth=1.4, zorder=1.5)
    low, high = (fit[f"{column}_{end}"].to_numpy(float) for end in ("low", "high"))
    axes.fill_between(sizes, low, high, color=look.colour, alpha=0.15, linewidth=0, zorder=1.2)


def _ideal(left: Axes, right: Axes, points: DataFrame, fits: DataFrame) -> None:
    sizes = sorted({*points["world_size"], *fits["world_size"]})
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
    return (
        f" Hollow or hatched: no efficiency, since more than the ranks differs: {listed}."
        * bool(listed)
    )


CHART = Chart(
    "Scaling",
    table_of,
    lambda table: draw(table, DataFrame(table.attrs["predicted"])),
    lambda table: (
        "Dotted: ideal. Dashed: a fit with the 95 % interval of the measurement's noise; beyond the "
        "last point it is a prediction, not a measurement. Efficiencies without an interval are of worlds "
        "that shared fewer than 3 blocks; without any they are unpaired, and include differences between "
        f"jobs and nodes.{hollow(table)}"
    ),
)
