"""Speedup over the baseline, one bar per cell, with its 95 % interval."""

from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame, Series, concat

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Bars, Chart, first_group
from vitsweep.tables.formatting import missing, plain, times
from vitsweep.tables.names import cell_names
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
    shown = cells[cells["speedup"].notna()].sort_values("speedup", ascending=False).head(MOST)
    absent = cells.attrs.get("unmeasured", [])[:MOST]
    unmeasured = [
        {"published": at, "published_by": source, "claim": note, first_group(cells): ""}
        for _, at, note, source in absent
    ]
    names = [*cell_names(cells)[shown.index], *(name for name, *_ in absent)]
    bars = Bars(
        column="speedup", low="speedup_low", high="speedup_high", group=first_group(cells), note=_note,
        sure=lambda row: plain(row["claim"]) in SURE, hatched=HATCHED, mark="published",
    )  # fmt: skip
    figure = bars.draw(concat([shown, DataFrame(unmeasured)]) if unmeasured else shown, names)
    [axes] = figure.axes
    style.reference_line(axes, 1.0)
    over = "repetitions" if "replicated" in cells else "blocks"
    axes.xaxis.label.set_text(f"{style.axis_label('speedup')}, 95 % interval over {over}")
    return figure


def _note(row: Series) -> str:
    claim = plain(row["claim"])
    is_plain = claim in (*SHOWN, Claim.no_difference_shown, Claim.baseline)
    size = row["published"] if missing(row["speedup"]) else row["speedup"]
    return times(size) + ("" if is_plain else f"  {claim}")


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
