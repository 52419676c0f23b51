"""Rate against arithmetic intensity, one point per cell and phase, below the device's limits."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts import style
from vitsweep.charts.style import LINES, MARKERS, Chart
from vitsweep.tables.names import cell_names
from vitsweep.tables.roofline import roofline, roofs
from vitsweep.tables.sweep_tables import SweepTables

MOST_CELLS = len(MARKERS)
"""Cells with a marker of their own; of more, the phases alone are told apart."""


def table_of(tables: SweepTables) -> DataFrame:
    """Return rate and intensity of the phases, where FLOPs and parameters were counted."""
    return roofline(tables.settings)


def draw(table: DataFrame) -> Figure:
    """Draw the table of `tables.roofline.roofline`: colour is the phase, the marker the cell.

    Roofs are drawn for every pair of limits in the table; points without limits are drawn too.
    """
    figure, axes = style.new_figure(8.8, 4.6)
    points = table[(table["intensity_flop_per_byte"] > 0) & (table["tflops_per_rank"] > 0)]
    names = cell_names(points.drop_duplicates("cell_id"))
    cells = dict(zip(points["cell_id"].drop_duplicates(), names, strict=True))
    few = len(cells) <= MOST_CELLS
    for (phase, cell), some in points.groupby(["phase", "cell_id"], sort=False):
        look: dict[str, Any] = {
            "color": style.PHASES[f"{phase}_ms"],
            "marker": MARKERS[list(cells).index(cell)] if few else "o",
            "ls": "none",
            "ms": 7,
            "mec": style.INK,
            "mew": 0.5,
        }
        axes.plot(some["intensity_flop_per_byte"], some["tflops_per_rank"], **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(0.12)
    _roofs(axes, points)
    for phase in dict.fromkeys(points["phase"]):
        colour = style.PHASES[f"{phase}_ms"]
        axes.plot([], [], "s", color=colour, ms=7, label=str(phase).capitalize())
    if few and len(cells) > 1:
        for marker, name in zip(MARKERS, cells.values(), strict=False):
            label = style.shorten([name], 40)[0]
            axes.plot([], [], marker, color="none", mec=style.INK, ms=7, label=label)
    axes.set(
        xlabel="Arithmetic intensity, at most (FLOP / byte moved)", ylabel="Rate per rank (TFLOP/s)"
    )
    style.legend(axes)
    return figure


def _roofs(axes: Axes, points: DataFrame) -> None:
    by_dtype = points.groupby("compute_dtype", sort=False)[["limit_tflops", "limit_gb_per_s"]]
    limits = by_dtype.median()  # measured rates differ a little from run to run
    left, right = axes.get_xlim()
    x = np.geomspace(left, right, 200)
    known: dict[tuple[float, float], list[str]] = {}
    for dtype, ends in zip(limits.index, limits.fillna(np.inf).to_numpy(float), strict=True):
        known.setdefault((float(ends[0]), float(ends[1])), []).append(str(dtype))
    for (peak, bandwidth), dtypes in known.items():
        roof = np.minimum(x * bandwidth / 1000, peak)
        rate = f"{peak:.3g} TFLOP/s" if np.isfinite(peak) else "memory bandwidth"
        label = f"{rate}, {', '.join(dtypes)}"
        if np.isfinite(roof).any():
            look: dict[str, Any] = {"color": style.INK, "linewidth": 1, "zorder": 0.9}
            axes.plot(x, roof, linestyle=LINES[len(axes.lines) % len(LINES)], label=label, **look)
    axes.set_xlim(left, right)


ROOFLINE = Chart("roofline", "Rate and arithmetic intensity of each phase", table_of, draw, roofs)
