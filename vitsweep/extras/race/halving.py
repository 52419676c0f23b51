"""Successive halving: which cells run once more, and which are dropped; numbers in, decisions out.

Every cell runs once. Then, round after round, the half with the lower mean is dropped and the others run
once more (Jamieson and Talwalkar 2016, AISTATS), until the last `LAST` have run as well. A mean is of log
ratios to the other runs of the same blocks: least squares with an effect of every cell and every block. One
cell, the reference, is in all blocks and never dropped. Nothing is kept between rounds: they follow from the
runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from vitsweep.tables.stats import half_width

LAST = 3
LEVEL = 0.01
"""Error of the interval within which a dropped cell may still be the fastest, two-sided, of each cell."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Measured runs, oldest first: number of the cell, name of the block, log of what is compared."""

    cell: NDArray[np.int64]
    block: NDArray[np.str_]
    log: NDArray[np.float64]

    def part(self, mask: "NDArray[np.bool_] | slice") -> "Runs":
        """Return some of the runs."""
        return Runs(self.cell[mask], self.block[mask], self.log[mask])


@dataclass(frozen=True, eq=False)
class Standing:
    """How far the halving came.

    Attributes:
        lacking: cells that have to run once more in this round; none where the halving is over.
        best: cells with runs that are still in it, the reference among them, fastest first.
        dropped: cell -> number of blocks after which it was dropped.
        mean: of each cell by all runs, log ratio to the reference; -inf of one without runs.
        runs: that count.
    """

    lacking: Sequence[int]
    best: Sequence[int]
    dropped: dict[int, int]
    mean: NDArray[np.float64]
    runs: Runs


def standing(runs: Runs, out: NDArray[np.bool_], references: Sequence[int]) -> Standing:
    """Return how far the halving came.

    Args:
        runs: all that were measured, oldest first.
        out: cells that are not measured further. They take part as far as they have runs.
        references: the reference, after those before it that are out.
    """
    runs, reference = _connected(runs, references), references[-1]
    places = [np.flatnonzero(runs.cell == cell) for cell in range(len(out))]
    alive, dropped, turn = [c for c in range(len(out)) if c != reference], dict[int, int](), 1
    while True:
        alive = [c for c in alive if len(places[c]) >= turn or not out[c]]
        lacking = [c for c in alive if len(places[c]) < turn]
        if lacking or len(alive) <= LAST:
            break
        before = runs.part(slice(max(places[c][turn - 1] for c in alive) + 1))
        of_cell = means(before, len(out), reference)
        alive.sort(key=lambda c, of_cell=of_cell: -of_cell[c])  # type: ignore[misc]
        kept = max(LAST, ceil(len(alive) / 2))
        dropped |= dict.fromkeys(alive[kept:], len(set(before.block)))
        alive, turn = alive[:kept], turn + 1
    mean = means(runs, len(out), reference)
    best = [c for c in (reference, *alive) if len(places[c]) and not out[c]]
    return Standing(lacking, sorted(best, key=lambda c: -mean[c]), dropped, mean, runs)


def _connected(runs: Runs, references: Sequence[int]) -> Runs:
    """Return the runs of blocks that hold a reference, or a cell of an earlier such block."""
    known, good = set(references), set[str]()
    for block in dict.fromkeys(runs.block.tolist()):
        if known & (cells := set(runs.cell[runs.block == block].tolist())):
            known |= cells
            good.add(block)
    return runs.part(np.isin(runs.block, [*good]))


def means(runs: Runs, num_cells: int, reference: int) -> NDArray[np.float64]:
    """Return the mean of each cell, see `Standing.mean`."""
    mean = fit(runs, num_cells)[0]
    return mean - (mean[reference] if np.isfinite(mean[reference]) else 0.0)


def fit(runs: Runs, num_cells: int) -> tuple[NDArray[np.float64], float, int]:
    """Fit log = cell + block + noise by least squares.

    Returns:
        The effect of each cell, -inf of one without runs; the standard deviation of a run, NaN where no cell
        ran twice; its degrees of freedom.
    """
    names, block = np.unique(runs.block, return_inverse=True)
    seen = np.zeros((num_cells, len(names)))
    np.add.at(seen, (runs.cell, block), 1.0)
    number = seen.sum(axis=1)
    share = seen / np.maximum(number, 1)[:, None]
    own = np.bincount(runs.cell, runs.log, num_cells) / np.maximum(number, 1)
    beyond = np.bincount(block, runs.log - own[runs.cell], len(names))
    level = np.linalg.lstsq(np.diag(seen.sum(axis=0)) - seen.T @ share, beyond, rcond=None)[0]
    mean = own - share @ level
    rest = runs.log - mean[runs.cell] - level[block]
    degrees = len(rest) - int((number > 0).sum()) - len(names) + 1
    noise = sqrt(float(rest @ rest) / degrees) if degrees > 0 else float("nan")
    return np.where(number > 0, mean, -np.inf), noise, degrees


def within_reach(
    at: Standing, leader: int, others: Sequence[int], fresh: Runs, reference: int, margin: float
) -> list[int]:
    """Return which other cells may be faster than the leader by more than a margin, fastest first.

    The leader was chosen by its runs (selection bias), so its ratio to the reference is that of the fresh
    blocks. Another cell's is the mean of its runs. The noise of a run is that of all runs together, and each
    cell has an interval with the error `LEVEL` of its own.

    Args:
        at: the end of the halving.
        leader: the cell that leads.
        others: cells to look at.
        fresh: runs of the fresh blocks, of which some hold leader and reference.
        reference: in all blocks.
        margin: log of a ratio.
    """
    number = np.bincount(at.runs.cell, minlength=len(at.mean))
    all_runs = [
        np.concatenate(pair)
        for pair in zip(vars(at.runs).values(), vars(fresh).values(), strict=True)
    ]
    _, noise, degrees = fit(Runs(*all_runs), len(at.mean))
    own = means(fresh, len(at.mean), reference)[leader]
    num_fresh = int((fresh.cell == leader).sum())
    found = []
    for cell in others:
        error = noise * sqrt(1 / number[cell] + 1 / num_fresh)
        if not at.mean[cell] + half_width(error, degrees, LEVEL) < own + margin:
            found.append(cell)
    return sorted(found, key=lambda c: -at.mean[c])
