"""How sure it is that a cell is on the Pareto front, given the noise of its measurement."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame, Series

from vitsweep.results.metrics import METRICS
from vitsweep.tables.show import peaks_gib
from vitsweep.tables.status import counted
from vitsweep.tables.within_blocks import WithinBlocks, within_blocks

Floats = NDArray[np.float64]

DRAWS = 1000
"""A probability near 1/2 is known to 0.03 (two standard errors)."""
LARGEST = 2e8
"""Comparisons of two cells in all draws; larger tables get fewer draws, at least 100."""


def front_probability(
    table: DataFrame, runs: DataFrame, objectives: Sequence[str], seed: int = 0
) -> Series:
    """Return the share of draws in which no other cell beats a cell: P(on the front).

    Each draw adds errors to what was measured. Throughput: the cells' logs by least squares within
    blocks (what a block does to all its cells cancels), with normal errors of their covariance
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
        was measured in fewer than two blocks.
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
        return _drawn_logs(within_blocks(runs), table["cell_id"].tolist(), draws, generator)
    values = table[objective].to_numpy(float)
    good = counted(runs)
    of_runs = (
        peaks_gib(good)
        if objective == "peak_gib"
        else pd.to_numeric(good[objective], errors="coerce")
        if objective in good
        else Series(np.nan, good.index)
    )
    groups = of_runs.groupby(good["cell_id"])
    error: Floats = (
        (groups.std() / np.sqrt(groups.count())).reindex(table["cell_id"]).to_numpy(float)
    )
    return values + np.nan_to_num(error) * generator.standard_normal((draws, len(values)))


def _drawn_logs(
    data: WithinBlocks, cells: list[str], draws: int, generator: np.random.Generator
) -> Floats:
    """Return draws x cells of log throughput; NaN for cells whose noise is unknown."""
    found = np.full((draws, len(cells)), np.nan)
    if not data.degrees:
        return found
    eigenvalues, vectors = data.spectrum
    normal = generator.standard_normal((draws, len(eigenvalues)))
    errors = data.noise * (normal / np.sqrt(eigenvalues)) @ vectors.T
    errors *= np.sqrt(data.degrees / generator.chisquare(data.degrees, (draws, 1)))
    place = {cell: i for i, cell in enumerate(data.cells)}
    for column, cell in enumerate(cells):
        if cell in place and data.num_blocks[place[cell]] > 1:
            found[:, column] = data.logs[place[cell]] + errors[:, place[cell]]
    return found
