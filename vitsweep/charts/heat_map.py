"""Speedup over two techniques, one cell of the grid per combination."""

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from vitsweep.charts import style
from vitsweep.charts.style import NOTHING, Chart
from vitsweep.results.record import Status
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.tables.formatting import plain, ratio
from vitsweep.tables.names import in_menu_order, varying_columns
from vitsweep.tables.sweep_tables import SweepTables

SLOWER_FASTER = LinearSegmentedColormap.from_list(
    "slower_faster", ["#d55e00", "#f5f5f5", "#0072b2"]
)


def two_groups(cells: DataFrame) -> tuple[str, ...]:
    """Return the two technique groups whose combinations are covered best; () where fewer vary."""
    groups = [c for c in varying_columns(cells) if c in GROUPS]
    return max(combinations(groups, 2), key=lambda pair: _num_filled(cells, pair), default=())


def _num_filled(cells: DataFrame, pair: Sequence[str]) -> int:
    return len(cells[[*pair]].astype(str).drop_duplicates())


def table_of(tables: SweepTables) -> DataFrame:
    """Return the cells where two technique groups form a grid that is filled by two thirds."""
    cells, pair = tables.settings, two_groups(tables.settings)
    if not pair or not cells["speedup"].notna().any():
        return NOTHING
    filled, size = _num_filled(cells, pair), cells[pair[0]].nunique() * cells[pair[1]].nunique()
    return cells if filled >= 4 and filled >= 2 / 3 * size else NOTHING


def draw(cells: DataFrame, rows: str, columns: str) -> Figure:
    """Draw the speedup by two columns; a combination that was not measured shows its status.

    Where other columns vary too, the fastest cell of a combination is drawn.
    """
    across = in_menu_order(columns, cells[columns].map(plain))
    down = in_menu_order(rows, cells[rows].map(plain))
    best = {(r, c): _best(cells, rows, r, columns, c) for r, c in product(down, across)}
    grid = np.array([[_number(best[r, c]) for c in across] for r in down], dtype=float)
    figure, axes = style.new_figure(2.6 + 1.15 * len(across), 1.4 + 0.55 * len(down))
    spread = np.nanmax(np.abs(grid - 1)) if np.isfinite(grid).any() else 0.0
    norm = TwoSlopeNorm(1.0, 1 - max(spread, 0.05), 1 + max(spread, 0.05))
    axes.pcolormesh(grid, cmap=SLOWER_FASTER, norm=norm, edgecolors=style.PAPER, linewidth=2)
    for (i, r), (j, c) in product(enumerate(down), enumerate(across)):
        strong = np.isfinite(grid[i, j]) and abs(grid[i, j] - 1) > 0.7 * spread
        dark = style.INK if not np.isfinite(grid[i, j]) else "#1b1c21"
        colour = "#fdfdfd" if strong else dark
        axes.text(
            j + 0.5, i + 0.5, _text(best[r, c]), ha="center", va="center", fontsize=9, color=colour
        )
    axes.set_xticks(np.arange(len(across)) + 0.5, across)
    axes.set_yticks(np.arange(len(down)) + 0.5, down)
    axes.invert_yaxis()
    axes.set(xlabel=columns.replace("_", " "), ylabel=rows.replace("_", " "))
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


def _best(cells: DataFrame, rows: str, r: str, columns: str, c: str) -> Series | None:
    some = cells[(cells[rows].map(plain) == r) & (cells[columns].map(plain) == c)]
    ranking = some.assign(_measured=some["status"] == Status.measured)
    ranking = ranking.sort_values(["_measured", "speedup"], na_position="first")
    return None if ranking.empty else ranking.iloc[-1]


def _number(row: Series | None) -> float:
    return float("nan") if row is None or plain(row["speedup"]) == "" else float(row["speedup"])


def _text(row: Series | None) -> str:
    if row is None:
        return "not in\nthe sweep"
    if plain(row["speedup"]):
        names = ("speedup", "speedup_low", "speedup_high", "claim")
        return ratio(*row[[*names]]).replace(" ", "\n", 1)
    return (plain(row["status"]) or "not run").replace("_", "\n")


CHART = Chart(
    "Speedup over two techniques, fastest cells",
    table_of,
    lambda cells: draw(cells, *two_groups(cells)),
)
