"""Colours, sizes and labels that all charts share."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from hashlib import sha256
from io import StringIO

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from pandas import DataFrame, Series

from vitsweep.results.metrics import FLAGS, METRICS
from vitsweep.results.record import Status
from vitsweep.spec.cell_spec import GROUPS, CellSpec
from vitsweep.spec.menu import choices
from vitsweep.tables.formatting import (
    count,
    distinct,
    shortened,
    span,
)
from vitsweep.tables.names import CHOICES, name_parts, series_names, varying_columns
from vitsweep.tables.render import baseline_line, common_settings, tally_of
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

LONGEST_LABEL, LONGEST_LINE = 120, 44
"""Characters of a label next to an axis, and of one of its lines."""


_FIRST = {field.name: getattr(field.type, "colour", None) for field in fields(CellSpec)}
"""Group -> index of its default choice in the palette."""


def place(group: str, choice: str) -> int:
    """Return the index of a choice in the palette: the same in every chart and on every day.

    Choices follow one another in menu order, so that the first eight of a group differ. Groups begin
    with different colours, so that the usual techniques of several groups differ in one chart too. A
    choice that is not on the menu, or of a group without a colour, gets an index by its name.
    """
    first, known = _FIRST.get(group), choices(group)
    if first is not None and choice in known:
        return (first + known.index(choice)) % len(PALETTE)
    return int(sha256(f"{group}={choice}".encode()).hexdigest(), 16) % len(PALETTE)


def colour(group: str, choice: str) -> str:
    """Return the colour of a choice of a config group."""
    return PALETTE[place(group, str(choice))]


def own_colours(techniques: Iterable[str]) -> dict[str, str]:
    """Return technique -> a colour of its own in one chart: its usual one, or the next that is free."""
    found: dict[str, str] = {}
    for name in dict.fromkeys(techniques):
        usual = PALETTE.index(colour(*name.split("=", 1)))
        in_turn = [*PALETTE[usual:], *PALETTE[:usual]]
        found[name] = next((c for c in in_turn if c not in found.values()), in_turn[0])
    return found


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


WIDEST_LINE = 100
"""Characters of a line of a legend, and of what a chart is compared with."""


def name_baseline(figure: Figure, cells: DataFrame, drawn: DataFrame) -> None:
    """Write above a chart what `baseline` stands for in it; nothing where its baselines share no setting.

    Args:
        figure: the chart.
        cells: all cells or settings of the sweep.
        drawn: the rows of the chart; of a single baseline what it shares with its cells is named too.
    """
    drawn_over = drawn.get("baseline_cell_id", Series(dtype=object)).dropna().unique()
    shared = [str(name_parts(cells)["match"][cells["cell_id"] == b].max()) for b in drawn_over]
    told = [*baseline_line(cells), *(shared if len(shared) == 1 else ())]
    text = textwrap.fill(" · ".join(filter(None, told)), WIDEST_LINE)
    if text:
        figure.suptitle(text, x=0.01, ha="left", color=QUIET, size=9)


def legend(axes: Axes, title: str = "") -> None:
    """Explain the marks below the axes, where that hides no data: bars first, as the title says."""
    marks = sorted(
        zip(*axes.get_legend_handles_labels(), strict=True),
        key=lambda mark: isinstance(mark[0], Line2D),
    )
    key(axes.get_figure(root=True), [h for h, _ in marks], [text for _, text in marks], title)


def key(
    figure: Figure | None, handles: Sequence[Artist], labels: Sequence[str], title: str = ""
) -> None:
    """Explain the marks that all panels share, below them."""
    if figure is None or not handles:
        return
    widest = max(len(line) for text in labels for line in text.splitlines())
    figure.legend(
        handles, labels, title=title.replace("_", " ") or None, alignment="left", frameon=False,
        ncols=max(min(4, WIDEST_LINE // widest), 1), loc="outside lower center",
        fontsize=9, title_fontsize=9, labelcolor=INK,
    ).get_title().set_color(INK)  # fmt: skip


def shorten(labels: Iterable[str], limit: int = LONGEST_LABEL) -> list[str]:
    """Leave out parts of long labels that distinguish none, the last ones first, then cut in the middle."""
    rows = [label.split(" · ") for label in labels]
    last = min(map(len, rows), default=1) - 1  # parts that all have, after what each changes
    for place in range(last):
        fewer = [[*row[: -1 - place], "", *row[len(row) - place :]] for row in rows]
        is_too_long = max(len(" · ".join(filter(None, row))) for row in rows) > limit
        if is_too_long and len({*map(tuple, fewer)}) == len({*map(tuple, rows)}):
            rows = fewer
    return [shortened(" · ".join(filter(None, row)), limit) for row in rows]


def folded(label: str) -> str:
    """Return a label in two lines of about the same length where it is long."""
    return textwrap.fill(label, max(LONGEST_LINE, len(label) // 2 + 8), break_on_hyphens=False)


def height(num_rows: int) -> float:
    """Return the height in inches of a chart with that many bars."""
    return 1.3 + 0.34 * max(num_rows, 2)


def freeze_layout(figure: Figure) -> Figure:
    """Return the figure with its layout computed once, however often it is saved.

    A `$` in a name is a letter, and begins no formula.
    """
    with matplotlib.rc_context({"text.parse_math": False}):  # of ticks that are made now
        for text in figure.findobj(Text):
            text.set_parse_math(False)
        if engine := figure.get_layout_engine():
            engine.execute(figure)  # where a value ends behind its bar follows from a first layout
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


# What a chart is: the table it draws, the drawing, the style of its series, and the caption below.


NOTHING = DataFrame()


@dataclass(frozen=True)
class Chart:
    """One chart of the report.

    Attributes:
        name: of its pictures.
        title: heading.
        draw: table -> figure.
        table: tables of a sweep -> the table that is drawn; empty where there is nothing to draw.
        reading: its caption, of `tables/sentences.yaml`; may depend on the table.
        over_baseline: it compares with a baseline, which is named above it.
        needs: columns of which so many cells as `least` have all.
        varies: columns that have several values among the cells.
        num_varied: least number of settings that distinguish the cells.
        one_device: the measured cells ran on one kind of device.
    """

    name: str
    title: str
    draw: Callable[[DataFrame], Figure]
    _: KW_ONLY
    table: Callable[[SweepTables], DataFrame] = lambda tables: tables.settings
    reading: str | Callable[[DataFrame], str] = ""
    over_baseline: bool = False
    needs: tuple[str, ...] = ("cell_id",)
    least: int = 1
    varies: tuple[str, ...] = ()
    num_varied: int = 0
    one_device: bool = False

    def is_for(self, cells: DataFrame) -> bool:
        """Whether cells have what the chart needs; else its table is not made."""
        known = cells.reindex(columns=[*self.needs, *self.varies])
        return (
            known[[*self.needs]].notna().all(axis=1).sum() >= self.least
            and all(known[c].nunique() > 1 for c in self.varies)
            and len(varying_columns(cells)) >= self.num_varied
            and not (self.one_device and mixed(cells))
        )


def mixed(cells: DataFrame) -> bool:
    """Return whether the measured cells ran on several kinds of device."""
    measured = cells[cells["status"] == Status.measured]
    return "device" in measured and measured["device"].nunique() > 1


# One style per series: colour by its technique, line and marker where the colour repeats.

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
    """Return a style per series; series of one colour differ in line and marker.

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
    """Return the `conditions` of cells, and which validity flags are set."""
    cells = checked_cells(cells)
    return " · ".join([conditions(cells), *flags(cells[cells["status"] == Status.measured])])


def conditions(cells: DataFrame) -> str:
    """Return device, versions, what all cells share, dates, and how cells ended."""
    cells = checked_cells(cells)
    measured = cells[cells["status"] == Status.measured]
    parts = [
        distinct(measured, "device"),
        *[text for text in common_settings(measured) if not text.endswith((" rank", " ranks"))],
        ranks(measured),
        *baseline_line(measured),
        *(
            f"{name} {text}"
            for name in ("torch", "CUDA")
            if (text := distinct(measured, name.lower()))
        ),
        dates(measured),
        tally_of(cells),
    ]
    return " · ".join(part for part in parts if part)


def ranks(cells: DataFrame) -> str:
    """Return `2 ranks` or `1 to 8 ranks`."""
    sizes = span(cells.get("world_size", ()), "{:.0f}".format)
    return sizes and f"{sizes} rank{'s' * (sizes != '1')}"


def dates(cells: DataFrame) -> str:
    """Return the day of the measurement, or `first to last` day."""
    if "started_at" not in cells:
        return ""
    days = pd.to_datetime(cells["started_at"], errors="coerce", utc=True, format="ISO8601").dropna()
    return span(days, lambda day: day.strftime("%Y-%m-%d"))


def flags(cells: DataFrame) -> Sequence[str]:
    """Return a sentence for each validity flag, with the number of cells it holds for."""
    counts = {flag: int(cells[flag].eq(True).sum()) for flag in FLAGS if flag in cells}
    return [
        f"{FLAGS[flag].caption} ({'all cells' if n == len(cells) else count(n, 'cell')})"
        for flag, n in counts.items()
        if n
    ]
