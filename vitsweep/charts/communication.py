"""Bytes sent per rank and step: counted by purpose, and what the formula says."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import Chart, labels
from vitsweep.tables.formatting import cell_label, number
from vitsweep.tables.scaling import PURPOSES, communication
from vitsweep.tables.sweep_tables import SweepTables

MIB = 2.0**20
MOST = 30
COLOURS = dict(zip(PURPOSES, ("#4477aa", "#88ccee", "#aa4499", "#bbbbbb"), strict=True))


def table_of(tables: SweepTables) -> DataFrame:
    """Return the bytes sent, where anything was sent."""
    table = communication(tables.settings)
    return table[table["bytes_per_step"] > 0]


def draw(table: DataFrame) -> Figure:
    """Draw the table of `tables.scaling.communication`: stacked counts, a diamond at the formula's total."""
    shown = table.sort_values("bytes_per_step", ascending=False).head(MOST)
    figure, axes = style.new_figure(8.6, style.height(len(shown)))
    left = shown["bytes_per_step"] * 0.0
    for purpose in (p for p in PURPOSES if p in shown):
        width = shown[purpose].fillna(0.0) / MIB
        name = purpose.partition("_")[0]
        axes.barh(
            range(len(shown)),
            width,
            left=left,
            height=style.BAR,
            color=COLOURS[purpose],
            label=name,
        )
        left = left + width
    formulas = shown[[c for c in shown if str(c).startswith("predicted_")]]
    if len(formulas.columns):
        total = formulas.sum(axis=1, min_count=len(formulas.columns)) / MIB
        axes.plot(total, range(len(shown)), "D", color=style.INK, ms=4.5, label="formula")
    for position, end in enumerate(left):
        style.value(axes, position, end, f"{number(end)} MiB")
    style.rows(axes, _names(table, shown), float(left.max()) if len(left) else 1.0)
    axes.set_xlabel("Sent per rank and step (MiB)")
    style.legend_below(axes)
    return figure


def _names(table: DataFrame, shown: DataFrame) -> list[str]:
    degrees = [str(c) for c in table if str(c).startswith("mesh.")]
    sizes = [c for c in ("world_size", "num_tokens", *degrees) if table[c].nunique() > 1]
    named = shown.assign(series=labels(table))
    return [
        " · ".join(text for text in (row["series"], cell_label(row, sizes)) if text)
        for _, row in named.iterrows()
    ]


CHART = Chart("Communication", table_of, draw)
