"""The optimizer step by implementation."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.series import labels
from vitsweep.tables.formatting import missing, number, percent, times


def draw(table: DataFrame) -> Figure:
    """Draw the table of `tables.optimizer_steps`: milliseconds, gain over the loop, share of step."""
    rest = labels(table.drop(columns="optimizer", errors="ignore"))
    shown = table.assign(_rest=rest).sort_values(["_rest", "family", "optimizer_ms"])
    figure, axes = style.new_figure(8.4, style.height(len(shown)))
    names = []
    for position, (_, row) in enumerate(shown.iterrows()):
        hue = style.colour("optimizer", f"{row['family']}_{row['implementation']}")
        axes.barh(position, row["optimizer_ms"], height=style.BAR, color=hue)
        compared = row["implementation"] != "loop" and not missing(row["step_ratio"])
        gain = "" if not compared else f", {times(row['step_ratio'])} the loop's speed"
        text = (
            f"{number(row['optimizer_ms'])} ms, {percent(row['share_of_step'])} of the step{gain}"
        )
        style.value(axes, position, row["optimizer_ms"], text)
        several = rest.nunique() > 1
        names.append(
            f"{row['family']} {row['implementation']}" + (f" · {row['_rest']}" if several else "")
        )
    style.rows(axes, names, 2.1 * shown["optimizer_ms"].max())
    axes.set_xlabel(style.axis_label("optimizer_ms"))
    return figure
