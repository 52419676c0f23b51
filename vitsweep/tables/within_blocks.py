"""Log throughput of cells with the effects of blocks taken out: least squares within blocks.

What the effects model, the probability of being on the Pareto front and the like start from.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame, Series

from vitsweep.tables.ratios import BLOCK, log_throughput_per_block, share_nodes
from vitsweep.tables.valid_runs import checked_runs, counted

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
    per_block = log_throughput_per_block(counted(checked_runs(runs)))
    return _reduced(per_block["cell_id"], _blocks(per_block), per_block["log_throughput"])


def _blocks(per_block: DataFrame) -> NDArray[np.int64]:
    """Return the number of each row's block; what was requeued onto other nodes is another block."""
    block = per_block.groupby(BLOCK, sort=False, dropna=False).ngroup()
    nodes = per_block["nodes_used"].astype(object)
    apart = nodes.groupby(block).nunique() > 1
    part = Series(0, per_block.index)
    for number in apart.index[apart]:
        groups: list[str] = []
        known = nodes[block == number].dropna().astype(str)
        for row in known.str.count(",").sort_values(ascending=False, kind="stable").index:
            found = [i for i, group in enumerate(groups) if share_nodes(group, known[row])]
            part[row] = found[0] if found else len(groups)
            groups += [] if found else [known[row]]
    parts = DataFrame({"block": block, "part": part}).groupby(["block", "part"])
    return np.asarray(parts.ngroup(), dtype=np.int64)


def _reduced(cell_ids: Series, block: NDArray[np.int64], logs: Series) -> WithinBlocks:
    cell, cells = pd.factorize(cell_ids)
    value = logs.to_numpy(float)
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
