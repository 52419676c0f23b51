"""Log throughput of cells with the effects of blocks taken out: least squares within blocks.

What the effects model, the probability of being on the Pareto front and the like start from.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame

from vitsweep.tables.checks import checked_runs
from vitsweep.tables.status import counted

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class WithinBlocks:
    """Sufficient statistics of `log(images/s) = cell + block + noise` with free block effects.

    Attributes:
        cells: cell ids, in the order of their first run.
        information: cells x cells; the inverse covariance of the cells' logs times the noise's
            variance. Its null space holds what no block compares, the common level first of all.
        total: per cell, the sum over its blocks of its log minus the mean log of the block.
        num_blocks: per cell.
        residual: sum of squares that neither cells nor blocks explain.
        degrees: degrees of freedom of `residual`.
    """

    cells: list[str]
    information: Floats
    total: Floats
    num_blocks: NDArray[np.int64]
    residual: float
    degrees: int

    @cached_property
    def spectrum(self) -> tuple[Floats, Floats]:
        """Eigenvalues above 0 of `information` (descending) and their vectors as columns."""
        values, vectors = np.linalg.eigh(self.information)
        kept = values > 1e-9 * max(float(values.max(initial=0.0)), 1.0)
        return values[kept][::-1], vectors[:, kept][:, ::-1]

    @property
    def logs(self) -> Floats:
        """Estimated log throughput per cell; only differences within connected cells mean anything."""
        values, vectors = self.spectrum
        estimate: Floats = vectors @ ((vectors.T @ self.total) / values)
        return estimate

    @property
    def noise(self) -> float:
        """Standard deviation of one run's log; NaN where no cell was measured in two blocks."""
        return float(np.sqrt(self.residual / self.degrees)) if self.degrees > 0 else float("nan")


def within_blocks(runs: DataFrame) -> WithinBlocks:
    """Take the effects of blocks out of the log throughput of the measured runs.

    Runs without a finite throughput above 0 are left out; several runs of a cell in one block count
    as their mean.

    Args:
        runs: one row per run: `cell_id, sweep, block, status, images_per_second` (img/s).

    Raises:
        VitsweepError: a column is missing or does not hold what its name says.
    """
    good = counted(checked_runs(runs))
    speed = good["images_per_second"].astype(float)
    logs = (
        good.loc[speed.notna(), ["cell_id", "sweep", "block"]]
        .assign(log=np.log(speed.dropna()))
        .groupby(["cell_id", "sweep", "block"], observed=True, sort=False, dropna=False)["log"]
        .mean()
        .reset_index()
    )
    return _reduced(logs)


def _reduced(logs: DataFrame) -> WithinBlocks:
    cell, cells = pd.factorize(logs["cell_id"])
    block = logs.groupby(["sweep", "block"], observed=True, sort=False, dropna=False).ngroup()
    value = logs["log"].to_numpy(float)
    num_blocks = int(block.max()) + 1 if len(block) else 0
    seen = np.zeros((len(cells), num_blocks))
    seen[cell, block] = 1.0
    sizes = seen.sum(axis=0)
    means = np.bincount(block, value, num_blocks) / np.maximum(sizes, 1)
    centred = value - means[block]
    information = np.diag(seen.sum(axis=1)) - (seen / np.maximum(sizes, 1)) @ seen.T
    total = np.bincount(cell, centred, len(cells)).astype(float)
    reduced = WithinBlocks(
        list(cells), information, total, seen.sum(axis=1).astype(np.int64), 0.0, 0
    )
    rank = len(reduced.spectrum[0])
    residual = max(float(centred @ centred - reduced.logs @ total), 0.0)
    degrees = len(value) - num_blocks - rank
    return WithinBlocks(
        reduced.cells, information, total, reduced.num_blocks, residual, max(degrees, 0)
    )
