"""Colours, sizes and labels that all charts share."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from io import BytesIO, StringIO
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation
from pandas import DataFrame, Series

from vitsweep.results.metrics import FLAGS, METRICS
from vitsweep.results.record import Status
from vitsweep.spec.cell_spec import GROUPS, CellSpec
from vitsweep.spec.menu import choices
from vitsweep.tables.cost import numbers
from vitsweep.tables.formatting import (
    count,
    distinct,
    missing,
    number,
    plain,
    shortened,
    span,
    tally,
)
from vitsweep.tables.names import CHOICES, series_names, varying_columns
from vitsweep.tables.render import baseline_line, common_settings
from vitsweep.tables.stats import Claim
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_cells

INK, QUIET, GRID, PAPER = "#1b1c20", "#6b6e76", "#d8dade", "#fefefe"
"""Text, secondary text, grid and ground; the report replaces them by the colours of its theme."""

TITLE_CHARACTERS = 76
BASELINE = "#8a8d94"
OUT_OF_MEMORY = "#b3261e"

PALETTE = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#d55e00",
    "#56b4e9",
    "#7a5195",
    "#9a8a00",
)
"""Okabe and Ito (2008), distinguishable with any colour vision; their black and yellow are replaced by
violet and olive, which are visible on white and on black."""

PHASES = {
    "data_ms": "#b4b7bd",
    "forward_ms": "#88ccee",
    "backward_ms": "#4477aa",
    "bubble_ms": "#ddddaa",
    "optimizer_ms": "#aa4499",
    "communication_ms": "#ddaa33",
}
"""Phases are no techniques and take other colours (Paul Tol's, colour-blind safe as well)."""

MARKERS = "osD^vPX*"
"""Markers besides the colour, for print in grey."""

LONGEST_LABEL = 56
"""Characters of a label beside an axis."""


_FIRST = {field.name: getattr(field.type, "colour", None) for field in fields(CellSpec)}
"""Group -> place of its plain choice in the palette."""


def place(group: str, choice: str) -> int:
    """Return the place of a choice in the palette: the same in every chart and on every day.

    Choices follow one another in menu order, so that the first eight of a group differ. Groups begin
    with different colours, so that the usual techniques of several groups differ in one chart too. A
    choice that is not on the menu, or of a group without a colour, gets a place by its name.
    """
    first, known = _FIRST.get(group), choices(group)
    if first is not None and choice in known:
        return (first + known.index(choice)) % len(PALETTE)
    return int(sha256(f"{group}={choice}".encode()).hexdigest(), 16) % len(PALETTE)


def colour(group: str, choice: str) -> str:
    """Return the colour of a choice of a config group."""
    return PALETTE[place(group, str(choice))]


def marker(group: str, choice: str) -> str:
    """Return the marker of a choice of a config group."""
    return MARKERS[place(group, str(choice))]


def axis_label(column: str) -> str:
    """Return label and unit of a measured column; another column is named as it is."""
    return METRICS[column].axis_label if column in METRICS else column.replace("_", " ")


def new_figure(width: float = 8.0, height: float = 4.0) -> tuple[Figure, Axes]:
    """Return a figure (inches) and its axes in the house style, without touching pyplot."""
    figure = empty_figure(width, height)
    return figure, dress(figure.add_subplot())


def empty_figure(width: float, height: float) -> Figure:
    """Return a figure (inches) without axes, for charts of several panels."""
    return Figure(figsize=(width, height), layout="constrained", facecolor=PAPER)


def stacked(parts: Sequence[DataFrame], draw: Callable[[Axes, DataFrame], None]) -> Figure:
    """Return a figure with one panel per table, one below the other, each as high as its bars."""
    heights = [height(len(part)) for part in parts]
    figure = empty_figure(9.0, sum(heights))
    every = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, part in zip(every, parts, strict=True):
        draw(dress(axes), part.reset_index(drop=True))
    return figure


def dress(axes: Axes) -> Axes:
    """Give axes the house style: two spines, quiet ticks, grid below the data."""
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    axes.tick_params(colors=INK, labelsize=9, length=3, color=QUIET)
    axes.xaxis.label.set(color=INK, size=10)
    axes.yaxis.label.set(color=INK, size=10)
    axes.grid(axis="both", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def title(axes: Axes, text: str) -> None:
    """Write the title of a panel above its left end."""
    axes.set_title(textwrap.fill(text, TITLE_CHARACTERS), loc="left", color=INK, size=11)


LONGEST_BESIDE, BELOW = 50, 100
"""Characters of a name in a legend beside the axes, and of a line of names below them."""


def legend(axes: Axes, title: str = "", columns: int = 1) -> None:
    """Put a frameless legend beside the axes, where it can hide no data; below them if it is wide."""
    handles, labels = axes.get_legend_handles_labels()
    if max(map(len, labels), default=0) > LONGEST_BESIDE:
        legend_below(axes, title)
    elif handles:
        axes.legend(
            handles,
            labels,
            title=title.replace("_", " "),
            ncols=columns,
            loc="upper left",
            bbox_to_anchor=(1.01, 1.0),
            frameon=False,
            fontsize=9,
            title_fontsize=9,
            labelcolor=INK,
            alignment="left",
        ).get_title().set_color(INK)


def legend_below(axes: Axes, title: str = "") -> None:
    """Put the legend of bars below them: beside them it would take the room of names and values."""
    marks = zip(*axes.get_legend_handles_labels(), strict=True)
    in_order = sorted(
        marks, key=lambda mark: isinstance(mark[0], Line2D)
    )  # bars, as the title says
    handles, labels = [h for h, _ in in_order], [text for _, text in in_order]
    widest = max((len(line) for text in labels for line in text.splitlines()), default=1)
    columns = max(min(4, BELOW // widest), 1)
    if title:
        handles, labels = [Patch(alpha=0), *handles], [f"{title.replace('_', ' ')}:", *labels]
    if handles:
        figure = axes.get_figure(root=True)
        assert figure is not None
        key(figure, handles, columns, labels)


def key(
    figure: Figure, handles: Sequence[Artist], columns: int, labels: Sequence[str] = ()
) -> None:
    """Explain the marks that all panels share, below them."""
    figure.legend(
        handles=handles,
        labels=labels or [str(handle.get_label()) for handle in handles],
        ncols=columns,
        loc="outside lower center",
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )


def shorten(labels: Iterable[str], limit: int = LONGEST_LABEL) -> list[str]:
    """Leave out parts of long labels that tell none apart, the last ones first, then cut in the middle."""
    rows = [label.split(" · ") for label in labels]
    last = min(map(len, rows), default=1) - 1  # parts that all have, after what each changes
    for place in range(last):
        fewer = [[*row[: -1 - place], "", *row[len(row) - place :]] for row in rows]
        is_too_long = max(len(" · ".join(filter(None, row))) for row in rows) > limit
        if is_too_long and len({*map(tuple, fewer)}) == len({*map(tuple, rows)}):
            rows = fewer
    return [shortened(" · ".join(filter(None, row)), limit) for row in rows]


def apart(names: Sequence[str]) -> list[str]:
    """Return names without the parts that all have; a chart says once what is common."""
    rows = [name.split(" · ") for name in names]
    if len({len(row) for row in rows}) != 1:
        return [*names]
    kept = [i for i, values in enumerate(zip(*rows, strict=True)) if len({*values}) > 1]
    return [" · ".join(row[i] for i in kept) for row in rows]


def freeze_layout(figure: Figure) -> Figure:
    """Return the figure with its layout computed once, however often it is saved."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        _with_room(axes)
    figure.draw_without_rendering()
    figure.set_layout_engine(None)  # "none" would leave a placeholder that is laid out anew
    return figure


def to_svg(figure: Figure) -> str:
    """Return the figure as SVG, the same text for the same figure: letters as outlines."""
    text = StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "vitsweep"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()


def themed(svg: str) -> str:
    """Return the SVG as an element of a page, in the colours of the page's theme."""
    colours = {
        INK: "currentColor",
        QUIET: "var(--quiet)",
        GRID: "var(--grid)",
        PAPER: "var(--paper)",
    }
    for fixed, variable in colours.items():
        svg = svg.replace(fixed, variable)
    return svg[svg.index("<svg") :]


def to_png(figure: Figure, dots_per_inch: int = 150) -> bytes:
    """Return the figure as PNG."""
    data = BytesIO()
    figure.savefig(data, format="png", dpi=dots_per_inch)
    return data.getvalue()


# One mark: horizontal bars with whiskers, values, and their frame.


BAR = 0.66
WIDEST = 1.5
"""A whisker longer than so many of the longest bar leaves the chart: the bars must be seen."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal bars, the first row on top: a mark that draws columns of a table.

    Attributes:
        column: where bars end.
        note: row -> text behind its bar.
        label: of the axis; that of the column if empty.
        low: lower ends of the intervals; empty for none.
        high: upper ends. A whisker beyond `WIDEST` ends there, in an arrow, and its end stands in the note.
        start: where bars begin; 0 if empty.
        parts: column -> colour and label of the parts that a bar is stacked from.
        group: technique whose choice colours a bar, with a legend.
        colour: row -> colour, where that is no technique's.
        grey: whether a baseline is grey.
        sure: row -> whether its bar is filled; hatched where not.
        hatched: what that means, for the legend.
        mark: column of a hollow mark in a row.
        marked: what that is, for the legend; the sources in `<mark>_by` if empty.
        reference: where a dashed line stands.
    """

    column: str
    note: Callable[[Series], str]
    label: str = ""
    low: str = ""
    high: str = ""
    start: str = ""
    parts: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    group: str = ""
    colour: Callable[[Series], str] | None = None
    grey: bool = True
    sure: Callable[[Series], bool] = lambda _: True
    hatched: str = ""
    mark: str = ""
    marked: str = ""
    reference: float | None = None

    def draw(self, table: DataFrame, names: Sequence[str], width: float = 8.4) -> Figure:
        """Draw the rows of a table in its order, labelled with names, or what tells these apart."""
        figure, axes = new_figure(width, height(len(table)))
        self.on(axes, table, apart(names))
        legend_below(axes, self.group)
        return figure

    def on(self, axes: Axes, table: DataFrame, names: Sequence[str]) -> None:
        """Draw on these axes."""
        columns = (self.column, self.start, self.low, self.high, self.mark)
        ends = DataFrame({i: numbers(table, c) for i, c in enumerate(columns)}, table.index)
        limit = max(_reach(ends[0], ends[3]), ends[4].fillna(0.0).max(), 1e-9)
        left = ends[1].fillna(0.0)
        for part, (hue, text) in self.parts.items():
            of_part = table[part].fillna(0.0)
            axes.barh(range(len(table)), of_part, left=left, height=BAR, color=hue, label=text)
            left = left + of_part
        drawn = zip(table.iterrows(), ends.fillna({0: 0.0, 1: 0.0}).to_numpy(float), strict=True)
        for at, ((_, row), (end, start, low, high, mark)) in enumerate(drawn):
            if not self.parts:
                look = _fill(self._colour(row), self.sure(row))
                axes.barh(at, end - start, left=start, height=BAR, **look)
            text, outer = self.note(row), max(0.0, start, end)
            if not (missing(low) or missing(high)):
                last = min(high, limit)
                reaches = [[max(end - low, 0.0)], [max(last - end, 0.0)]]
                axes.errorbar(end, at, xerr=reaches, color=INK, linewidth=1.2, capsize=3)
                outer = max(outer, last)
            if high > limit:
                axes.plot(limit, at, ">", color=INK, ms=5)  # it goes on
                text += f", up to {number(high)}"
            if not missing(mark):
                axes.plot(mark, at, zorder=4, **HOLLOW)
                outer = max(outer, mark + 0.015 * limit)  # clear of the value
            _value(axes, at, outer, text)
        self._legend(axes, table)
        rows(axes, names, limit)
        axes.set_xlabel(self.label or axis_label(self.column), loc="right")  # the left has no room
        if self.reference is not None:
            axes.axvline(self.reference, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)

    def _legend(self, axes: Axes, table: DataFrame) -> None:
        coloured = (
            [self._colour(row) != BASELINE for _, row in table.iterrows()] if self.group else []
        )
        for choice in filter(
            None, table.loc[coloured, self.group].map(plain).unique() if coloured else ()
        ):
            axes.bar(math.nan, 0, color=colour(self.group, choice), label=choice)
        drawn = table[table[self.column].notna()]
        if self.hatched and not all(self.sure(row) for _, row in drawn.iterrows()):
            axes.bar(math.nan, 0, label=self.hatched, **_fill(QUIET, False))
        sources = table.get(f"{self.mark}_by", Series(dtype=str)).dropna().unique()
        named = [self.marked] if self.marked and table[self.mark].notna().any() else []
        for text in [*named, *(textwrap.fill(f"published: {source}", 24) for source in sources)]:
            axes.plot([], [], label=text, **HOLLOW)

    def _colour(self, row: Series) -> str:
        if self.colour:
            return self.colour(row)
        is_baseline = self.grey and plain(row.get("claim")) == Claim.baseline
        return BASELINE if is_baseline else colour(self.group, plain(row[self.group]))


HOLLOW: dict[str, Any] = {"marker": "D", "ls": "", "mfc": PAPER, "mec": INK, "mew": 1.4, "ms": 7}


def _value(axes: Axes, position: float, end: float, text: str) -> None:
    """Write a value behind the end of a bar, readable over lines."""
    axes.annotate(
        text,
        (end, position),
        xytext=BEHIND,
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=INK,
        bbox={"fc": PAPER, "ec": "none", "pad": 1},
    ).set_in_layout(False)  # the axis grows instead


BEHIND = (5, 0)
"""Points between a bar and its value."""


def _with_room(axes: Axes) -> None:
    """Lengthen the axis until every value behind a bar ends before its end."""
    (left, right), width = axes.get_xlim(), axes.get_window_extent().width
    for text in axes.texts:
        if isinstance(text, Annotation) and text.xyann == BEHIND:
            end = float(text.xy[0])
            needed = text.get_window_extent().x1 - axes.transData.transform((end, 0))[0]
            if needed < 0.8 * width:
                right = max(right, left + (end - left) / (1 - (needed + 4) / width))
    axes.set_xlim(left, right)


def rows(axes: Axes, labels: Sequence[str], limit: float) -> None:
    """Label the rows, first on top.

    Args:
        axes: of the bars.
        labels: of the rows.
        limit: where the longest bar or whisker ends.
    """
    axes.set_yticks(range(len(labels)), shorten(labels))
    axes.set_ylim(max(len(labels), 1) - 0.4, -0.6)
    axes.set_xlim(0, 1.05 * limit if limit > 0 else 1)
    axes.grid(axis="y", visible=False)


def _reach(values: Series, highs: Series) -> float:
    """Return where the longest whisker ends, at most `WIDEST` times the longest bar; 1 for no bar."""
    if values.dropna().empty:
        return 1.0
    longest = float(values.max())
    return min(
        max(float(highs.max()), longest) if highs.notna().any() else longest, WIDEST * longest
    )


def height(num_rows: int) -> float:
    """Return the height in inches of a chart with that many bars."""
    return 1.3 + 0.34 * max(num_rows, 2)


def _fill(colour: str, sure: bool) -> dict[str, Any]:
    """Return how a bar is filled: hatched where nothing is claimed."""
    return {"color": colour} if sure else {"fc": PAPER, "ec": colour, "hatch": "////"}


# What a chart is: the table it draws, the drawing, the look of its series, and the caption below.


NOTHING = DataFrame()


@dataclass(frozen=True)
class Chart:
    """One chart of the report; a file of this folder names its own `CHART`.

    Attributes:
        title: heading.
        table: tables of a sweep -> the table that is drawn; empty where there is nothing to draw.
        draw: table -> figure.
        reading: its caption, of `tables/sentences.yaml`; may depend on the table.
    """

    title: str
    table: Callable[[SweepTables], DataFrame]
    draw: Callable[[DataFrame], Figure]
    reading: str | Callable[[DataFrame], str] = ""

    @property
    def name(self) -> str:
        """Name of the file that defines it, and of its pictures."""
        return self.table.__module__.rpartition(".")[2]


def mixed(cells: DataFrame) -> bool:
    """Return whether the measured cells ran on several kinds of device."""
    measured = cells[cells["status"] == Status.measured]
    return "device" in measured and measured["device"].nunique() > 1


# One look per series: colour by its technique, line and marker where the colour repeats.

MOST_SERIES = 8
"""More lines cannot be distinguished."""

LINES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
SIZE_CHOICES = ("batch", "measurement", "task")


@dataclass(frozen=True)
class Look:
    """How one series is drawn."""

    colour: str
    marker: str
    line: object


def choice_columns(cells: DataFrame) -> list[str]:
    """Return the choices that vary: what a series of a chart is named after."""
    return [c for c in varying_columns(cells) if c in CHOICES and c not in SIZE_CHOICES]


def first_group(cells: DataFrame) -> str:
    """Return the technique that colours: the first that varies."""
    columns = choice_columns(cells)
    return next((c for c in columns if c in GROUPS), next(iter(columns), "precision"))


def labels(cells: DataFrame) -> Series:
    """Return the series each cell belongs to, `O1 · fsdp`."""
    return series_names(cells, choice_columns(cells))


def settings(cells: DataFrame) -> Series:
    """Return the setting each cell belongs to, named by all that was varied but the seed.

    Trainings that differ in a learning rate or in the images of a step have no mean in common.
    """
    varied = varying_columns(cells.drop(columns="seed", errors="ignore"))
    return series_names(cells, varied)


def looks(cells: DataFrame, series: Series | None = None) -> dict[str, Look]:
    """Return a look per series; series of one colour differ in line and marker.

    Args:
        cells: one row per cell.
        series: name of the series of each cell; by default `labels`.
    """
    columns, group = choice_columns(cells), first_group(cells)
    series = labels(cells) if series is None else series
    grey = _baselines(cells, series)
    by_choice = bool(columns) or series.nunique() == 1
    found: dict[str, Look] = {}
    for label, choice in zip(series, cells[group].astype(str), strict=True):
        if label in found:
            continue
        number = place(group, choice) if by_choice else len(found) % len(PALETTE)
        colour = BASELINE if label in grey else PALETTE[number]
        twins = sum(look.colour == colour for look in found.values())
        marker = MARKERS[(number + twins) % len(MARKERS)]
        found[label] = Look(colour, marker, LINES[twins % len(LINES)])
    return found


def _baselines(cells: DataFrame, series: Series) -> set[str]:
    """Return the series that hold nothing but baselines."""
    if "claim" not in cells:
        return set()
    only = (cells["claim"].astype(str) == Claim.baseline).groupby(series).all()
    return {str(name) for name in only.index[only]}


def fastest(
    table: DataFrame, most: int = MOST_SERIES, series: Series | None = None
) -> tuple[DataFrame, str]:
    """Return the rows of the fastest series and of the baseline, and `8 fastest of 40` if cut."""
    series = labels(table) if series is None else series
    best = table["images_per_second"].groupby(series).max().sort_values(ascending=False)
    baselines = _baselines(table, series) | {n for n in best.index if n.startswith("baseline")}
    kept = {*best.index[:most], *baselines}
    shown = table[series.isin(kept)]
    if len(kept) == len(best):
        return shown, ""
    also = " and the baseline" if len(kept) > most else ""
    return shown, f"{most} fastest of {len(best)}{also}"


# The line below a chart: device, versions, dates, unmeasured cells and validity flags.


def caption(cells: DataFrame) -> str:
    """Return device, versions, what all cells share, dates, what is left out, and which flags are set."""
    cells = checked_cells(cells)
    measured = cells[cells["status"] == Status.measured]
    parts = [
        distinct(measured, "device"),
        *[text for text in common_settings(measured) if not text.endswith((" rank", " ranks"))],
        ranks(measured),
        *baseline_line(measured),
        _prefixed("torch ", distinct(measured, "torch")),
        _prefixed("CUDA ", distinct(measured, "cuda")),
        dates(measured),
        f"{len(measured)} of {len(cells)} cells measured",
        *left_out(cells),
        *flags(measured),
    ]
    return " · ".join(part for part in parts if part)


def ranks(cells: DataFrame) -> str:
    """Return `2 ranks` or `1 to 8 ranks`."""
    if "world_size" not in cells or cells["world_size"].dropna().empty:
        return ""
    low, high = int(cells["world_size"].min()), int(cells["world_size"].max())
    return f"{low} to {high} ranks" if low != high else count(high, "rank")


def dates(cells: DataFrame) -> str:
    """Return the day of the measurement, or `first to last` day."""
    if "started_at" not in cells:
        return ""
    days = pd.to_datetime(cells["started_at"], errors="coerce", utc=True, format="ISO8601").dropna()
    return span(days, lambda day: day.strftime("%Y-%m-%d"))


def left_out(cells: DataFrame) -> Sequence[str]:
    """Return `left out: 2 out of memory, 1 invalid` where cells were not measured."""
    listed = tally(cells.loc[cells["status"] != Status.measured, "status"])
    return [f"left out: {listed}"] if listed else []


def flags(cells: DataFrame) -> Sequence[str]:
    """Return a sentence for each validity flag, with the number of cells it holds for."""
    counts = {flag: int(cells[flag].eq(True).sum()) for flag in FLAGS if flag in cells}
    return [
        f"{FLAGS[flag].caption} ({'all' if n == len(cells) else n} cells)"
        for flag, n in counts.items()
        if n
    ]


def _prefixed(prefix: str, text: str) -> str:
    return prefix + text if text else ""
