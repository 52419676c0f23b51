"""One traced step per implementation of an optimizer, as a profiler shows it."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.chart import Chart
from vitsweep.tables.formatting import count, number
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.traces import DEVICE, HOST, optimizer_traces

HALF = 0.34
CONTEXT = 0.25
"""How much of the backward pass is shown, in lengths of the longest optimizer step."""
FINEST = 2000
"""Operations closer than one of so many parts of the width are drawn as one."""


def table_of(tables: SweepTables) -> DataFrame:
    """Return traced steps where two implementations of one optimizer left a trace."""
    return optimizer_traces(tables.settings, tables.traces)


def draw(steps: DataFrame) -> Figure:
    """Draw the table of `tables.traces.optimizer_traces`, all on one scale of time.

    Time runs from the first operation of the optimizer step, which is coloured; grey, to the left,
    is the end of the backward pass before it. The number of operations is the step's own.
    """
    aligned = steps.assign(start_ms=steps["start_ms"] - _begin(steps))
    own = aligned[aligned["in_optimizer"]]
    longest = float((own["start_ms"] + own["ms"]).max()) if len(own) else 1.0
    left = -CONTEXT * longest
    cells = list(dict.fromkeys(steps["cell_id"]))
    figure, axes = style.new_figure(9.2, 1.4 + 0.62 * max(len(cells), 2))
    names = []
    for position, cell in enumerate(cells):
        rows = aligned[aligned["cell_id"] == cell]
        seen = rows[(rows["start_ms"] + rows["ms"] > left) & (rows["start_ms"] < longest)]
        family, implementation = (str(rows[c].iloc[0]) for c in ("family", "implementation"))
        hue = style.colour("optimizer", f"{family}_{implementation}")
        lanes = [lane for lane in (HOST, DEVICE) if (rows["lane"] == lane).any()]
        for place, lane in enumerate(lanes):
            borders, here = _half(position, place, len(lanes)), seen[seen["lane"] == lane]
            for of_optimizer, colour in ((False, style.BASELINE), (True, hue)):
                chosen = here[here["in_optimizer"] == of_optimizer]
                _bars(axes, chosen, longest - left, borders, colour)
        style.value(axes, position, _end(rows), _summary(rows))
        names.append(f"{family} {implementation}")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), 1) - 0.45, -0.55)
    axes.set_xlim(left, 1.45 * longest)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"Time since the optimizer step of {steps['model'].iloc[0]} began (ms)")
    return figure


def _begin(steps: DataFrame) -> Series:
    """Return for each row when its cell's optimizer step began; 0 where the trace has none."""
    first = steps[steps["in_optimizer"]].groupby("cell_id", observed=True)["start_ms"].min()
    return steps["cell_id"].map(first).astype(float).fillna(0.0)


def _end(rows: DataFrame) -> float:
    own = rows[rows["in_optimizer"]]
    return float((own["start_ms"] + own["ms"]).max()) if len(own) else 0.0


def _half(position: int, place: int, lanes: int) -> tuple[float, float]:
    """Return the lower and upper border: the host above, the device below where there is one."""
    if lanes == 1:
        return position - HALF, 2 * HALF
    return (position - HALF, 0.9 * HALF) if place == 0 else (position + 0.1 * HALF, 0.9 * HALF)


def _bars(
    axes: Axes, rows: DataFrame, width: float, borders: tuple[float, float], hue: str
) -> None:
    parts: list[tuple[float, float]] = []
    for start, long in zip(rows["start_ms"], rows["ms"], strict=True):
        if parts and start - sum(parts[-1]) < width / FINEST:
            parts[-1] = (parts[-1][0], max(start + long - parts[-1][0], parts[-1][1]))
        else:
            parts.append((start, long))
    axes.broken_barh(parts, borders, color=hue, linewidth=0)


def _summary(rows: DataFrame) -> str:
    lane = DEVICE if (rows["lane"] == DEVICE).any() else HOST
    own = rows[rows["in_optimizer"] & (rows["lane"] == lane)]
    noun = "kernel" if lane == DEVICE else "operation"
    if own.empty:
        return "no optimizer step in the trace"
    long = float((own["start_ms"] + own["ms"]).max() - own["start_ms"].min())
    return f"{count(len(own), noun)}, {number(long)} ms"


CHART = Chart(
    "One traced step by implementation of the optimizer",
    table_of,
    draw,
    "Coloured: the optimizer step; grey: the end of the backward pass. The profiler "
    "slows small operations down: compare the shape, and take times from the table.",
)
