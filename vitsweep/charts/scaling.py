"""Scaling by number of ranks: throughput, efficiency, speedup; throughput by length."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator, ScalarFormatter
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.bars import Bars
from vitsweep.charts.style import (
    NOTHING,
    Chart,
    Look,
    fastest,
    labels,
    looks,
)
from vitsweep.results.record import Status
from vitsweep.tables.formatting import count, missing, number, ratio
from vitsweep.tables.load import ordered
from vitsweep.tables.scaling import cores_per_rank
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import SURE, Claim
from vitsweep.tables.sweep_tables import SweepTables

TITLES = {
    "strong": "Strong scaling: images of a step fixed",
    "weak": "Weak scaling: images of a rank fixed",
}


def draw(curves: DataFrame) -> Figure:
    """Draw the table of `tables.scaling`: one row of panels for strong, one for weak scaling.

    Hollow points have no efficiency, since not only the number of ranks differs; no line leads to them.
    A curve without two points that differ in nothing else has no ideal line.

    Args:
        curves: as `scaling_efficiency` returns them.
    """
    curves, cut = fastest(curves)
    kinds = [k for k in TITLES if (curves["scaling"] == k).any()]
    figure = style.empty_figure(9.6, 3.7 * len(kinds))
    styles = looks(curves)
    for kind, panels in zip(kinds, figure.subplots(len(kinds), 2, squeeze=False), strict=True):
        some = curves[curves["scaling"] == kind].assign(series=labels(curves))
        left, right = map(style.dress, panels)
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
    line: dict[str, Any] = {"color": look.colour, "linestyle": look.line, "linewidth": 1.8}
    joined = points[~shared]
    axes.plot(joined["world_size"], joined[column], label=name, **line)
    for chosen, face in ((joined, look.colour), (points[shared], style.PAPER)):
        marks: dict[str, Any] = {"ms": 6, "mec": look.colour, "mfc": face, "mew": 1.4}
        axes.plot(chosen["world_size"], chosen[column], look.marker, **marks)
    if column == "efficiency":
        known = points.dropna(subset=["efficiency_low", "efficiency_high"])
        size, low, high = (known[c] for c in (column, "efficiency_low", "efficiency_high"))
        ends = [(size - low).clip(lower=0), (high - size).clip(lower=0)]
        axes.errorbar(known["world_size"], size, ends, fmt="none", color=look.colour, capsize=3)


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


SCALING = Chart(
    "scaling", "Scaling", draw, table=lambda tables: tables.scaling, varies=("world_size",),
    one_device=True, reading=lambda table: f"{say('whiskers')} {hollow(table)}".rstrip(),
)  # fmt: skip

# The speedup over the baseline at each number of ranks, as bars per world size.


def several(tables: SweepTables) -> DataFrame:
    """Return the scaling curves where there are several to compare."""
    table = tables.scaling
    return table if len(table) and labels(table).nunique() > 1 else NOTHING


def draw_speedups(curves: DataFrame) -> Figure:
    """Draw throughput per rank by number of ranks, baseline in grey, speedup over it in words.

    Takes one kind of scaling from the table of `tables.scaling`: weak where there is one.
    """
    kind = "weak" if (curves["scaling"] == "weak").any() else "strong"
    some, _ = fastest(curves[curves["scaling"] == kind])
    some = some.assign(series=labels(some)).sort_values("world_size", kind="stable")
    styles = looks(some)
    bars = Bars(
        column="images_per_second_per_rank", note=_note, colour=lambda row: styles[row["series"]].colour,
        sure=lambda row: row["claim"] == Claim.baseline
        or (not missing(row["efficiency"])
        and (missing(row["claim"]) or row["claim"] in (*SURE, Claim.nothing))),
    )  # fmt: skip
    ranks = some["world_size"].map(lambda n: count(n, "rank"))
    return bars.draw(some, (ranks + " · " + some["series"]).tolist(), 8.8)


def _note(row: Series) -> str:
    rate = f"{number(row['images_per_second_per_rank'])} img/s"
    size = ratio(row["speedup"], row["speedup_low"], row["speedup_high"])
    return rate if row["claim"] == Claim.baseline or not size else f"{rate}, {size}"


GPU_SCALING = Chart(
    "gpu_scaling", "Speedup by number of ranks", draw_speedups, table=several, reading=SCALING.reading,
    varies=("world_size",), one_device=True, over_baseline=True,
)  # fmt: skip

# Throughput against the length of the sequence, one line per method.

ALIKE_IN_LENGTHS = ("world_size", "cores_per_rank", "images_per_step")
"""Columns in which the points of one line do not differ; nor do they in their mesh."""


def lengths_of(tables: SweepTables) -> DataFrame:
    """Return the measured and out-of-memory cells where one method was tried at three lengths."""
    cells = tables.settings[tables.settings["status"].isin([Status.measured, Status.out_of_memory])]
    tried = cells["num_tokens"].groupby(labels(cells)).nunique()
    return ordered(cells).copy() if tried.max() >= 3 else NOTHING  # in one piece


def draw_lengths(cells: DataFrame) -> Figure:
    """Draw tokens/s by tokens per image, both logarithmic; x marks lengths that ran out of memory.

    Points are joined where the ranks, their mesh and cores, and the images of a step are the same.
    """
    cells, cut = fastest(cells)
    table = cells.assign(series=labels(cells), cores_per_rank=cores_per_rank(cells))
    table = table.sort_values("num_tokens")
    alike = [c for c in table if c in ALIKE_IN_LENGTHS or str(c).startswith("mesh.")]
    measured = table[table["status"] == Status.measured]
    failed = table[table["status"] == Status.out_of_memory]
    figure, axes = style.new_figure(8.4, 4.4)
    floor = measured["tokens_per_second"].min() * 0.7 if len(measured) else 1.0
    for place, (name, look) in enumerate(looks(cells).items()):
        line = measured[measured["series"] == name]
        parts = line.groupby(alike, dropna=False, observed=True, sort=False)
        for nth, (_, part) in enumerate(parts):
            axes.plot(
                part["num_tokens"], part["tokens_per_second"], color=look.colour, marker=look.marker,
                linestyle=look.line, linewidth=1.8, label="" if nth else name,
            )  # fmt: skip
        ended = failed.loc[failed["series"] == name, "num_tokens"]
        at = [floor * 0.9**place] * len(ended)
        axes.plot(ended, at, "x", color=look.colour, ms=8, mew=2.2)
    if len(failed):
        axes.plot([], [], "x", color=style.INK, ms=8, mew=2.2, label="out of memory")
    lengths = sorted(table["num_tokens"].astype(float).unique())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(lengths, [f"{n:,.0f}" for n in lengths], rotation=30, ha="right")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="Tokens of one image", ylabel=style.axis_label("tokens_per_second"))
    style.legend(axes, cut)
    return figure


SEQUENCE_LENGTH = Chart(
    "sequence_length", "Throughput by length of the sequence", draw_lengths, table=lengths_of,
    needs=("tokens_per_second",), varies=("num_tokens",),
)  # fmt: skip
