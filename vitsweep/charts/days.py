"""Speedups of the same cells on two days or machines, the largest changes on top."""

from typing import Any

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.tables.formatting import times
from vitsweep.tables.stats import SHOWN, Claim

MOST = 30
SIDES = {"a": "A", "b": "B"}


def draw(table: DataFrame, names: dict[str, str] | None = None) -> Figure:
    """Draw the table of `tables.sweep_diff.sweep_diff`: hollow is A, filled B, with 95 % intervals.

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
