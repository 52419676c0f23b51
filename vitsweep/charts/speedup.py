"""Speedup over the baseline: one bar per cell, with its 95 % interval."""

from matplotlib.figure import Figure
from pandas import DataFrame, Series, concat

from vitsweep.charts import style
from vitsweep.charts.bars import Bars
from vitsweep.charts.style import Chart, first_group
from vitsweep.extras import each
from vitsweep.tables.formatting import missing, plain, ratio
from vitsweep.tables.names import cell_names
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import SHOWN, SURE, Claim
from vitsweep.tables.sweep_tables import SweepTables

MOST = 30
"""Bars beyond it cannot be read; the table has them all."""


def table_of(tables: SweepTables) -> DataFrame:
    """Return the cells, with the figures that optional features mark next to their speedup."""
    marked = [mark(tables, "speedup") for mark in each(tables.features, "marks")]
    return marked[0] if marked else tables.settings


def draw(cells: DataFrame) -> Figure:
    """Draw the cells that have a speedup, the largest on top; hatched where it is not significant.

    Bars are coloured by the first technique that varies; the baseline is grey.
    """
    shown = cells[cells["speedup"].notna()].sort_values("speedup", ascending=False).head(MOST)
    absent = cells.attrs.get("unmeasured", [])[:MOST]
    unmeasured = [
        {"published": at, "published_by": source, "claim": note, first_group(cells): ""}
        for _, at, note, source in absent
    ]
    names = [*cell_names(cells)[shown.index], *(name for name, *_ in absent)]
    over = "repetitions" if "replicated" in cells else "blocks"
    bars = Bars(
        column="speedup", low="speedup_low", high="speedup_high", group=first_group(cells), note=_note,
        sure=lambda row: plain(row["claim"]) in SURE, hatched="hatched: not significant",
        mark="published", reference=1.0, label=f"{style.axis_label('speedup')}, 95 % interval over {over}",
    )  # fmt: skip
    return bars.draw(
        concat([shown, DataFrame(unmeasured)], ignore_index=True) if unmeasured else shown, names
    )


def _note(row: Series) -> str:
    claim = plain(row["claim"])
    is_plain = claim in (*SHOWN, Claim.no_difference_shown, Claim.baseline)
    names = ("speedup", "speedup_low", "speedup_high", "claim")
    size = ratio(row["published"]) if missing(row["speedup"]) else ratio(*row[[*names]])
    return size + ("" if is_plain else f"  {claim}")


SPEEDUP = Chart(
    "speedup", "Speedup over the baseline", draw, table=table_of, over_baseline=True, reading=say("whiskers"),
    needs=("speedup",), least=2,
)  # fmt: skip
