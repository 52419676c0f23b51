"""Throughput against the length of the sequence, one line per method."""

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart, fastest, labels, looks
from vitsweep.results.record import Status
from vitsweep.tables.load import ordered
from vitsweep.tables.scaling import cores_per_rank
from vitsweep.tables.sweep_tables import SweepTables

ALIKE = ("world_size", "cores_per_rank", "images_per_step")
"""Columns in which the points of one line do not differ; nor do they in their mesh."""


def lengths_of(tables: SweepTables) -> DataFrame:
    """Return the measured and out-of-memory cells where one method was tried at three lengths."""
    cells = tables.settings[tables.settings["status"].isin([Status.measured, Status.out_of_memory])]
    if cells["num_tokens"].nunique() < 3 or cells["tokens_per_second"].isna().all():
        return NOTHING
    tried = cells["num_tokens"].groupby(labels(cells)).nunique()
    return ordered(cells).copy() if tried.max() >= 3 else NOTHING  # in one piece


def draw_lengths(cells: DataFrame) -> Figure:
    """Draw tokens/s by tokens per image, both logarithmic; x marks lengths that ran out of memory.

    Points are joined where the ranks, their mesh and cores, and the images of a step are the same.
    """
    cells, cut = fastest(cells)
    table = cells.assign(series=labels(cells), cores_per_rank=cores_per_rank(cells))
    table = table.sort_values("num_tokens")
    alike = [c for c in table if c in ALIKE or str(c).startswith("mesh.")]
    measured = table[table["status"] == Status.measured]
    failed = table[table["status"] == Status.out_of_memory]
    figure, axes = style.new_figure(8.4, 4.4)
    floor = measured["tokens_per_second"].min() * 0.7 if len(measured) else 1.0
    for place, (name, look) in enumerate(looks(cells).items()):
        line = measured[measured["series"] == name]
        parts = line.groupby(alike, dropna=False, observed=True, sort=False)
        for nth, (_, part) in enumerate(parts):
            axes.plot(
                part["num_tokens"], part["tokens_per_second"], color=look.colour, marker=look.marker,
                linestyle=look.line, linewidth=1.8, label="" if nth else name,
            )  # fmt: skip
        ended = failed.loc[failed["series"] == name, "num_tokens"]
        at = [floor * 0.9**place] * len(ended)
        axes.plot(ended, at, "x", color=look.colour, ms=8, mew=2.2)
    if len(failed):
        axes.plot([], [], "x", color=style.INK, ms=8, mew=2.2, label="out of memory")
    lengths = sorted(table["num_tokens"].astype(float).unique())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(lengths, [f"{n:,.0f}" for n in lengths], rotation=30, ha="right")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="Tokens of one image", ylabel=style.axis_label("tokens_per_second"))
    style.legend(axes, cut)
    return figure


SEQUENCE_LENGTH = Chart(
    "sequence_length", "Throughput by length of the sequence", lengths_of, draw_lengths
)
