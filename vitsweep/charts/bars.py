"""One mark: horizontal bars with whiskers, values, and their frame."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import BASELINE, INK, PAPER, QUIET
from vitsweep.tables.formatting import missing, number, plain
from vitsweep.tables.stats import Claim
from vitsweep.tables.valid_runs import numbers

BAR = 0.66
WIDEST = 1.5
"""A whisker longer than so many of the longest bar leaves the chart: the bars must be seen."""
HOLLOW: dict[str, Any] = {"marker": "D", "ls": "", "mfc": PAPER, "mec": INK, "mew": 1.4, "ms": 7}
ROUND = HOLLOW | {"marker": "o"}
"""A diamond is a published figure, a circle one that was measured here."""
VALUE: dict[str, Any] = {
    "va": "center", "fontsize": 8.5, "color": INK, "bbox": {"fc": PAPER, "ec": "none", "pad": 1},
}  # fmt: skip
"""A value behind the end of a bar is readable over lines."""


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
        group: technique whose choice colours a bar, with a legend where there are several.
        colour: row -> colour, where that is no technique's.
        grey: whether a baseline is grey.
        sure: row -> whether its bar is filled; hatched where not.
        hatched: what that means, for the legend.
        mark: column of a hollow mark in a row.
        marked: what that is, for the legend, with round marks; the sources in `<mark>_by` if empty.
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
        """Draw the rows of a table in its order, labelled with names, or what distinguishes them."""
        figure, axes = style.new_figure(width, style.height(len(table)))
        self.on(axes, table, apart(names))
        style.legend(axes, self.group if self._choices(table) else "")
        return figure

    def on(self, axes: Axes, table: DataFrame, names: Sequence[str]) -> None:
        """Draw on these axes."""
        columns = (self.column, self.start, self.low, self.high, self.mark)
        ends = DataFrame({i: numbers(table, c) for i, c in enumerate(columns)}, table.index)
        longest = ends[0].max()
        reach = min(ends[[0, 3]].max(axis=None), WIDEST * longest) if longest == longest else 1.0
        limit = max(reach, ends[4].fillna(0.0).max(), 1e-9)
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
                axes.plot(mark, at, zorder=4, **(ROUND if self.marked else HOLLOW))
                outer = max(outer, mark + 0.015 * limit)  # clear of the value
            end = max(outer, self.reference or 0.0)  # clear of the dashed line
            axes.annotate(text, (end, at), xytext=(5, 0), textcoords="offset points", **VALUE)
        self._legend(axes, table)
        lines = [style.folded(name) for name in style.shorten(names)]
        axes.set_yticks(range(len(names)), lines, linespacing=1.0)
        axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
        axes.set_xlim(0, 1.05 * limit)
        axes.grid(axis="y", visible=False)
        label = self.label or style.axis_label(self.column)
        axes.set_xlabel(label, loc="right")  # the left has no room
        if self.reference is not None:
            axes.axvline(self.reference, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0.9)

    def _legend(self, axes: Axes, table: DataFrame) -> None:
        for choice in self._choices(table):
            axes.bar(math.nan, 0, color=style.colour(self.group, choice), label=choice)
        drawn = [row for _, row in table.iterrows() if not missing(row[self.column])]
        if self.hatched and not all(map(self.sure, drawn)):
            axes.bar(math.nan, 0, label=self.hatched, **_fill(QUIET, False))
        sources = table.get(f"{self.mark}_by", Series(dtype=str)).dropna().unique()
        named = [self.marked] if self.marked and table[self.mark].notna().any() else []
        for text in [*named, *(f"published: {source}" for source in sources)]:
            axes.plot([], [], label=text, **(ROUND if self.marked else HOLLOW))

    def _choices(self, table: DataFrame) -> list[str]:
        """Return the choices that colours distinguish; a single one needs no legend."""
        every = [row for _, row in table.iterrows() if self.group]
        found = dict.fromkeys(plain(r[self.group]) for r in every if self._colour(r) != BASELINE)
        return [choice for choice in found if choice] if len(found) > 1 else []

    def _colour(self, row: Series) -> str:
        if self.colour:
            return self.colour(row)
        is_baseline = self.grey and plain(row.get("claim")) == Claim.baseline
        return BASELINE if is_baseline else style.colour(self.group, plain(row[self.group]))


def stacked(parts: Sequence[DataFrame], draw: Callable[[Axes, DataFrame], None]) -> Figure:
    """Return a figure with one panel per table, one below the other, each as high as its bars."""
    heights = [style.height(len(part)) for part in parts]
    figure = style.empty_figure(9.0, sum(heights))
    every = figure.subplots(len(parts), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, part in zip(every, parts, strict=True):
        draw(style.dress(axes), part.reset_index(drop=True))
    return figure


def apart(names: Sequence[str]) -> list[str]:
    """Return names without the parts that all have; a chart says once what is common."""
    rows = [name.split(" · ") for name in names]
    if len({len(row) for row in rows}) != 1:
        return [*names]
    kept = [i for i, values in enumerate(zip(*rows, strict=True)) if len({*values}) > 1]
    return [" · ".join(row[i] for i in kept) for row in rows]


def _fill(colour: str, sure: bool) -> dict[str, Any]:
    """Return how a bar is filled: hatched where it is not significant."""
    return {"color": colour} if sure else {"fc": PAPER, "ec": colour, "hatch": "////"}
