"""The Pareto front of throughput, memory and accuracy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import METRICS
from vitsweep.tables.blocks import WithinBlocks, within_blocks
from vitsweep.tables.cost import measured_with_peak, numbers
from vitsweep.tables.stats import MIN_BLOCKS
from vitsweep.tables.valid_runs import valid_runs

# How sure it is that a cell is on the Pareto front, given the noise of its measurement.


Floats = NDArray[np.float64]

DRAWS = 1000
"""A probability near 1/2 is known to 0.03 (two standard errors)."""
LARGEST = 2e8
"""Comparisons of two cells in all draws; larger tables get fewer draws, at least 100."""


def front_probability(
    table: DataFrame, runs: DataFrame, objectives: Sequence[str], seed: int = 0
) -> Series:
    """Return the share of draws in which no other cell beats a cell: P(on the front).

    Each draw adds errors to what is shown. Throughput: the cells' logs, with errors of least squares within
    blocks (what a block does to all its cells cancels), normal errors of their covariance
    times a draw of the pooled standard deviation, so Student's t. Other objectives: the value of the
    table with independent normal errors, the standard error of the cell's runs. Draws are around
    the estimates, so the best of many equal cells looks surer than it is.

    Args:
        table: one row per cell: `cell_id` and the objectives.
        runs: one row per run of these cells.
        objectives: columns with a better side in `METRICS`.
        seed: of the draws; the same table gives the same numbers.

    Returns:
        A probability per row, NaN where a value is missing or a cell's noise is unknown because it
        was measured in fewer than three blocks.
    """
    cells = table["cell_id"].tolist()
    draws = int(np.clip(LARGEST / max(len(cells), 1) ** 2, 100, DRAWS))
    generator = np.random.default_rng(seed)
    mine = runs[runs["cell_id"].isin(cells)]
    values = np.stack([_drawn(o, table, mine, draws, generator) for o in objectives], axis=2)
    signs = np.array([1.0 if METRICS[o].better == "higher" else -1.0 for o in objectives])
    known = np.isfinite(values).all(axis=(0, 2))
    shares = np.full(len(cells), np.nan)
    shares[known] = np.mean([undominated(draw) for draw in values[:, known] * signs], axis=0)
    return Series(shares, table.index)


def undominated(points: Floats) -> NDArray[np.bool_]:
    """Return which rows no other row beats in one column without losing in another.

    Args:
        points: cells x objectives, larger is better.
    """
    as_good = np.ones((len(points), len(points)), dtype=bool)
    better = np.zeros_like(as_good)
    for column in points.T:
        as_good &= column[None, :] >= column[:, None]
        better |= column[None, :] > column[:, None]
    return np.logical_not((as_good & better).any(axis=1))


def _drawn(
    objective: str, table: DataFrame, runs: DataFrame, draws: int, generator: np.random.Generator
) -> Floats:
    """Return draws x cells of one objective."""
    if objective == "images_per_second":
        shown = table.set_index("cell_id")["images_per_second"].astype(float).map(np.log)
        return _drawn_logs(within_blocks(runs), shown, draws, generator)
    values = table[objective].to_numpy(float)
    good = valid_runs(runs)
    groups = numbers(good, objective).groupby(good["cell_id"])
    error: Floats = (
        (groups.std() / np.sqrt(groups.count())).reindex(table["cell_id"]).to_numpy(float)
    )
    return values + np.nan_to_num(error) * generator.standard_normal((draws, len(values)))


def _drawn_logs(
    data: WithinBlocks, logs: Series, draws: int, generator: np.random.Generator
) -> Floats:
    """Return draws x cells of log throughput; NaN for cells whose noise is unknown.

    Args:
        data: gives the errors; it knows no level of cells that no block compares.
        logs: cell -> log of the throughput that is shown.
        draws: how many.
        generator: source of randomness.
    """
    found = np.full((draws, len(logs)), np.nan)
    if not data.degrees:
        return found
    eigenvalues, vectors = data.spectrum
    normal = generator.standard_normal((draws, len(eigenvalues)))
    errors = data.noise * (normal / np.sqrt(eigenvalues)) @ vectors.T
    errors *= np.sqrt(data.degrees / generator.chisquare(data.degrees, (draws, 1)))
    place = {cell: i for i, cell in enumerate(data.cells)}
    for column, (cell, log) in enumerate(logs.items()):
        if cell in place and data.num_blocks[place[cell]] >= MIN_BLOCKS:
            found[:, column] = log + errors[:, place[cell]]
    return found


OBJECTIVES = ("images_per_second", "peak_gib", "accuracy_top1")
IF_TRAINED = ("accuracy_top1",)
"""Objectives that only cells of some tasks have."""


def pareto_front(
    cells: DataFrame,
    objectives: Sequence[str] = OBJECTIVES,
    runs: DataFrame | None = None,
) -> DataFrame:
    """Return the measured cells with `on_front`: no other cell is better in one and worse in none.

    Objectives that no cell has are left out. Cells with an accuracy are compared with one another, and those
    without with one another in the other objectives: `objectives` names those of each row. A cell that lacks
    another one is not on the front. `on_front` compares the shown values; with `runs`,
    `on_front_probability` is the share of draws of the measurement's noise in which the cell is on the front
    (see `front_probability`).

    Args:
        cells: one row per cell.
        objectives: columns with a better side in `METRICS`.
        runs: one row per run of these cells, where probabilities are wanted.

    Raises:
        VitsweepError: an objective of which neither way is better, or none that was measured.
    """
    table = measured_with_peak(cells)
    for objective in objectives:
        if objective not in METRICS:
            raise VitsweepError(f"`{objective}` is not a metric of results/metrics.py.")
    used = [o for o in objectives if o in table and table[o].notna().any()]
    unsigned = [o for o in used if METRICS[o].better is None]
    if unsigned or not used:
        raise VitsweepError(f"No cell can be better in {', '.join(unsigned or objectives)}.")
    signs = Series({o: 1.0 if METRICS[o].better == "higher" else -1.0 for o in used})
    optional = [o for o in used if o in IF_TRAINED and len(used) > 1]
    known = table[optional].notna()
    table = table.assign(on_front=False, objectives="")
    for has, rows in known.groupby(optional) if optional else [((), table)]:
        own = [o for o in used if o not in optional or has[optional.index(o)]]
        points = (table.loc[rows.index, own] * signs[own]).to_numpy(float)
        whole = ~np.isnan(points).any(axis=1)
        table.loc[rows.index[whole], "on_front"] = undominated(points[whole])
        table.loc[rows.index, "objectives"] = ", ".join(own)
        if runs is not None:
            chance = front_probability(table.loc[rows.index], runs, own)
            table.loc[rows.index, "on_front_probability"] = chance
    return table.sort_values(used[0], ascending=signs[used[0]] < 0)
