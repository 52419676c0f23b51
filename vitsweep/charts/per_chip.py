"""Throughput per chip, relative to one reference, by device."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.series import labels, looks
from vitsweep.tables.formatting import times


def draw(table: DataFrame) -> Figure:
    """Draw the table of `tables.per_chip`: bars in groups of one device, the slowest on top."""
    shown, styles = table.assign(series=labels(table)), looks(table)
    figure, axes = style.new_figure(8.0, style.height(len(table)))
    several = shown["series"].nunique() > 1
    texts = [
        f"{d} · {n}" if several else str(d)
        for d, n in zip(shown["device"], shown["series"], strict=True)
    ]
    for position, (_, row) in enumerate(shown.iterrows()):
        ratio = row["relative_throughput"]
        axes.barh(position, ratio, height=style.BAR, color=styles[row["series"]].colour)
        style.value(axes, position, ratio, times(ratio))
    style.rows(axes, texts, table["relative_throughput"].max())
    style.reference_line(axes, 1.0)
    reference = table["reference"].iloc[0] if len(table) else ""
    axes.set_xlabel(f"Throughput per chip relative to {reference} (x)")
    return figure
