"""Speedup over the baseline, one bar per cell, with its 95 % interval."""

from math import nan
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.tables.formatting import plain, times
from vitsweep.tables.names import cell_names, varying_columns
from vitsweep.tables.published import with_published
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import SHOWN, SURE, Claim
from vitsweep.tables.sweep_tables import SweepTables

MOST = 30
"""Bars beyond it cannot be read; the table has them all."""

HATCHED = "hatched: no difference shown"


def table_of(tables: SweepTables) -> DataFrame:
    """Return the cells where at least one is compared with another."""
    if tables.settings["speedup"].notna().sum() < 2:
        return NOTHING
    return with_published(tables.settings, tables.published, "speedup")


def draw(cells: DataFrame) -> Figure:
    """Draw the cells that have a speedup, the largest on top; hatched where nothing is claimed.

    Bars are coloured by the first technique that varies; the baseline is grey.
    """
    columns, names = varying_columns(cells) or ["precision"], cell_names(cells)
    group = next((c for c in columns if c in GROUPS), columns[0])
    shown = cells[cells["speedup"].notna()].sort_values("speedup", ascending=False).head(MOST)
    unmeasured = cells.attrs.get("unmeasured", [])[:MOST]
    figure, axes = style.new_figure(8.4, style.height(len(shown) + len(unmeasured)))
    ends = style.reach(shown["speedup"], shown["speedup_high"])
    if "published" in shown:
        ends = max(ends, shown["published"].fillna(0).max(), *(at for _, at, *_ in unmeasured))
    for position, (_, row) in enumerate(shown.iterrows()):
        claim = plain(row["claim"])
        hue = style.BASELINE if claim == Claim.baseline else style.colour(group, row[group])
        note = "" if claim in (*SHOWN, Claim.no_difference_shown, Claim.baseline) else f"  {claim}"
        text, look = times(row["speedup"]) + note, style.fill(hue, claim in SURE)
        whisker = row["speedup_low"], row["speedup_high"]
        mark = row.get("published")
        style.bar(axes, position, row["speedup"], text, look, whisker, ends, mark)
    for position, (_, at, note, _) in enumerate(unmeasured, len(shown)):
        axes.plot(at, position, zorder=4, **style.HOLLOW)
        style.value(axes, position, at + 0.015 * ends, f"{times(at)}  {note}")
    others = shown[shown["claim"] != Claim.baseline]
    for choice in dict.fromkeys(others[group].astype(str)):
        axes.bar(0, 0, color=style.colour(group, choice), label=choice)
    if not shown["claim"].isin(SURE).all():
        axes.bar(nan, 0, label=HATCHED, **style.fill(style.QUIET, False))
    sources = shown.get("published_by", Series(dtype=str)).dropna().tolist()
    for source in dict.fromkeys([*sources, *(source for *_, source in unmeasured)]):
        axes.plot([], [], label=fill(f"published: {source}", 24), **style.HOLLOW)
    labels = [*style.apart(names[shown.index].tolist()), *(name for name, *_ in unmeasured)]
    style.rows(axes, labels, ends)
    style.reference_line(axes, 1.0)
    over = "repetitions" if "replicated" in cells else "blocks"
    axes.set_xlabel(f"{style.axis_label('speedup')}, 95 % interval over {over}")
    style.legend_below(axes, group)
    return figure


CHART = Chart("Speedup over the baseline", table_of, draw, f"{say('whiskers')} {say('hatched')}")


# Speedups of the same cells on two days or machines, the largest changes on top.

SIDES = {"a": "A", "b": "B"}


def draw_changes(table: DataFrame, names: dict[str, str] | None = None) -> Figure:
    """Draw what changed from one sweep to another: hollow is A, filled B, with 95 % intervals.

    A change that is shown is dark and has its size beside it; the others are grey.

    Args:
        table: one row per cell.
        names: cell -> the name that is shown.
    """
    shown = table[table["change"].notna() & (table["claim"] != Claim.baseline)].head(MOST)
    figure, axes = style.new_figure(8.8, style.height(len(shown)))
    furthest = 1.0
    for position, row in enumerate(shown.to_dict("records")):
        changed = row["claim"] in SHOWN
        colour = style.PALETTE[0] if changed else style.BASELINE
        for side, shift, face in (("a", -0.14, style.PAPER), ("b", 0.14, colour)):
            middle, ends = (
                row[f"speedup_{side}"],
                [row[f"speedup_{side}_{e}"] for e in ("low", "high")],
            )
            style.whiskers(axes, position + shift, middle, *ends)
            look: dict[str, Any] = {"mec": colour, "mfc": face, "mew": 1.5, "ms": 7, "zorder": 3}
            axes.plot(middle, position + shift, "o", **look)
            furthest = max([furthest, middle, *(e for e in ends if e == e)])
        text = f"{times(row['change'])} [{row['change_low']:.2f}, {row['change_high']:.2f}]"
        end = max(
            v for s in SIDES for v in (row[f"speedup_{s}"], row[f"speedup_{s}_high"]) if v == v
        )
        style.value(axes, position, end, text if changed else "")
    labels = [(names or {}).get(c, str(c)) for c in shown["cell_id"]]
    style.rows(axes, labels, furthest)
    axes.set_xlim(0, 1.3 * furthest)
    style.reference_line(axes, 1.0)
    axes.plot([], [], "o", mec=style.QUIET, mfc=style.PAPER, mew=1.5, ms=7, label="A")
    axes.plot([], [], "o", color=style.QUIET, ms=7, label="B")
    axes.set_xlabel("Speedup over the baseline (x)")
    style.legend(axes)
    return figure
