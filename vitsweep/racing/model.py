"""A robust Bayesian mixed model of log throughput, from which joint draws of all cells are taken.

The log throughput of a run is

    y = block + cold (first run of a block) + main effects + pairwise interactions + residual of the
        cell + noise,

each term with an independent Gaussian prior: a linear mixed model, equivalently a Gaussian process
whose kernel is the sum of the terms' kernels (Rasmussen and Williams 2006, section 2.7). The noise is
Student's t with 4 degrees of freedom, as a scale mixture of Gaussians fitted by iterative reweighting
(Lange, Little and Taylor 1989), since some runs are slow for reasons of the machine. The four scales
(main effects, interactions, residual, noise) maximize the marginal likelihood times log-normal priors
(empirical Bayes). Draws are made by Matheron's rule: a draw of the prior plus its correction towards
the data (Wilson et al. 2020, arXiv:2002.09309), which needs no cells x cells matrix.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import minimize

from vitsweep.racing.design import USUAL_EFFECT, Design, Floats, Ints

DEGREES = 4.0
"""Of Student's t."""
BLOCK_SD, COLD_SD = 0.5, 0.1
"""Prior of a block's level, which is nearly flat, and of the first run of a block."""
CHUNK = 2000
"""Cells whose columns are in memory at a time."""
GROWTH, FIRST_FIT, MOST_ROWS = 1.4, 24, 350
"""The scales are fitted to the first 24 runs, then each time the data have grown by 1.4, to at most the
latest 350."""
PASSES = 5
"""Of the reweighting."""


@dataclass(frozen=True)
class Scales:
    """Standard deviations of log throughput: means of their log-normal priors, or fitted.

    Attributes:
        main: of main effects.
        pairs: of pairwise interactions.
        residual: of what a cell has beyond them.
        noise: of one run.
    """

    main: float = USUAL_EFFECT
    pairs: float = 0.02
    residual: float = 0.01
    noise: float = 0.03

    @property
    def logs(self) -> Floats:
        """Their logarithms."""
        return np.log([self.main, self.pairs, self.residual, self.noise])


SMOOTH, RUGGED = (Scales(), 0.7), (Scales(residual=0.02), 0.3)
"""Prior scales, and the standard deviation of the log of the residual's: where nearly every cell is run,
and where most never are. A cell that never ran shows nothing of its own residual, so that the model must
not be sure of a small one from the few that did."""
OTHER_LOG_SD = 1.0
"""The same for the other three scales."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs in the order in which they began.

    Attributes:
        cell: number of its cell.
        block: number of its block, from 0 without gaps.
        first: 1.0 for the first run of a block.
        log: log throughput, or of another figure that should be large.
        log_cost: log of a second figure that should be small, such as peak memory, where a race looks
            for the Pareto front of both; None in a race for one figure.
    """

    cell: Ints
    block: Ints
    first: Floats
    log: Floats
    log_cost: Floats | None = None

    def __len__(self) -> int:
        return len(self.cell)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return int(self.block.max(initial=-1)) + 1

    def part(self, rows: slice | NDArray[np.bool_]) -> "Runs":
        """Return some of the runs, blocks numbered anew."""
        block = np.unique(self.block[rows], return_inverse=True)[1].astype(np.int64)
        log_cost = None if self.log_cost is None else self.log_cost[rows]
        return Runs(self.cell[rows], block, self.first[rows], self.log[rows], log_cost)

    @property
    def of_cost(self) -> "Runs":
        """The same runs for the second figure, its sign turned so that larger is better."""
        assert self.log_cost is not None
        return Runs(self.cell, self.block, self.first, -self.log_cost)


class Posterior:
    """What the runs say about all cells.

    Attributes:
        scales: that were fitted.
        weights: of the runs, 1 for a usual one, towards 0 for one far off.
        residuals: of the runs, y - the model's mean, log throughput.
        mean: of each cell, log throughput, up to a constant.
    """

    def __init__(self, design: Design, runs: Runs, scales: Scales) -> None:
        self.scales, self._design, self._runs = scales, design, runs
        self._main, self._pairs = design.main(runs.cell), design.pairs(runs.cell)
        seen = runs.log - runs.log.mean()
        gram = _gram(_Columns(self._main, self._pairs, runs), scales.logs)
        self.weights = np.ones(len(runs))
        variance = scales.noise**2
        for _ in range(PASSES):
            self._used = self.weights
            self._factor = _factor(gram, variance / self._used)
            self._solved = cho_solve(self._factor, seen)
            self.residuals = variance / self._used * self._solved
            self.weights = (DEGREES + 1) / (DEGREES + self.residuals**2 / variance)
        self.mean = np.concatenate(
            [self._towards(c, self._solved[:, None]) for c in self.chunks()]
        )[:, 0]

    def draws(self, num: int, random: np.random.Generator) -> Callable[[Ints], Floats]:
        """Return a function from cells (a contiguous range) to their joint draws, cells x `num`."""
        runs, s = self._runs, self.scales
        of_main = s.main * random.normal(size=(self._main.shape[1], num))
        of_pairs = s.pairs * random.normal(size=(self._pairs.shape[1], num))
        own = s.residual * random.normal(size=(self._design.num_cells, num))
        at_runs = self._main @ of_main + self._pairs @ of_pairs + own[runs.cell]
        blocks = BLOCK_SD * random.normal(size=(int(runs.block.max()) + 1, num))[runs.block]
        cold = COLD_SD * runs.first[:, None] * random.normal(size=(1, num))
        noise = s.noise / np.sqrt(self._used)[:, None] * random.normal(size=(len(runs), num))
        seen = (runs.log - runs.log.mean())[:, None]
        solved = cho_solve(self._factor, seen - at_runs - blocks - cold - noise)

        def at(cells: Ints) -> Floats:
            prior = self._design.main(cells) @ of_main + self._design.pairs(cells) @ of_pairs
            return prior + own[cells] + self._towards(cells, solved)

        return at

    def chunks(self) -> Iterator[Ints]:
        """Yield all cells, some at a time."""
        everything = np.arange(self._design.num_cells)
        for start in range(0, len(everything), CHUNK):
            yield everything[start : start + CHUNK]

    def _towards(self, cells: Ints, solved: Floats) -> Floats:
        """Return cov(cells, runs) times what was solved, runs x any number."""
        s, runs = self.scales, self._runs
        main = self._design.main(cells) @ (self._main.T @ solved)
        pairs = self._design.pairs(cells) @ (self._pairs.T @ solved)
        own = np.zeros((len(cells), solved.shape[1]))
        here = (runs.cell >= cells[0]) & (runs.cell <= cells[-1])  # chunks are contiguous
        np.add.at(own, runs.cell[here] - cells[0], solved[here])
        return s.main**2 * main + s.pairs**2 * pairs + s.residual**2 * own


class Model:
    """Fits the model to growing data.

    What it returns depends on the design and the runs alone, so that an interrupted race goes on as
    it would have gone; fitted scales are kept between calls only to save time.

    Args:
        design: of all cells.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        self._fitted: dict[int, Scales] = {}

    def posterior(self, runs: Runs) -> Posterior:
        """Return what the runs say, two at least.

        Args:
            runs: all of them, oldest first.
        """
        return Posterior(self.design, runs, self._scales(runs))

    def _scales(self, runs: Runs) -> Scales:
        prior, residual_log_sd = RUGGED if self._is_sparse else SMOOTH
        size, scales = FIRST_FIT, prior
        sizes = [min(size, len(runs))]
        while (size := round(size * GROWTH)) <= len(runs):
            sizes.append(size)
        for size in sizes:
            if size not in self._fitted:
                # keyed by the number of runs: runs are only ever added
                fitted = _fit(
                    self.design, runs.part(slice(0, size)), scales, prior, residual_log_sd
                )
                if size < FIRST_FIT:
                    return fitted
                self._fitted[size] = fitted
            scales = self._fitted[size]
        return scales

    @property
    def _is_sparse(self) -> bool:
        return self.design.num_cells > 1000


@dataclass(frozen=True, eq=False)
class _Columns:
    main: Floats
    pairs: Floats
    runs: Runs


def _gram(columns: _Columns, logs: Floats) -> Floats:
    """Return the covariance of the runs without their noise."""
    runs, variances = columns.runs, np.exp(2 * logs)
    same = runs.cell[:, None] == runs.cell[None]
    return (
        variances[0] * (columns.main @ columns.main.T)
        + variances[1] * (columns.pairs @ columns.pairs.T)
        + variances[2] * same
        + BLOCK_SD**2 * (runs.block[:, None] == runs.block[None])
        + COLD_SD**2 * np.outer(runs.first, runs.first)
    )


def _factor(gram: Floats, noise: Floats) -> tuple[Floats, bool]:
    covariance = gram.copy()
    covariance[np.diag_indices(len(noise))] += noise
    factor: tuple[Floats, bool] = cho_factor(
        covariance, lower=True, overwrite_a=True, check_finite=False
    )
    return factor


def _fit(
    design: Design, runs: Runs, start: Scales, prior: Scales, residual_log_sd: float
) -> Scales:
    """Maximize marginal likelihood times prior over the scales, twice, with the runs reweighted between."""
    recent = runs.part(slice(max(len(runs) - MOST_ROWS, 0), None))
    seen = recent.log - recent.log.mean()
    main, pairs = design.main(recent.cell), design.pairs(recent.cell)
    parts = (
        main @ main.T,
        pairs @ pairs.T,
        (recent.cell[:, None] == recent.cell[None]).astype(float),
    )
    fixed = BLOCK_SD**2 * (recent.block[:, None] == recent.block[None])
    fixed = fixed + COLD_SD**2 * np.outer(recent.first, recent.first)
    log_sd = np.array([OTHER_LOG_SD, OTHER_LOG_SD, residual_log_sd, OTHER_LOG_SD])

    def loss(logs: Floats, weights: Floats) -> float:
        v = np.exp(2 * np.clip(logs, -9, 1))
        gram = v[0] * parts[0] + v[1] * parts[1] + v[2] * parts[2] + fixed
        factor = _factor(gram, v[3] / weights)
        penalty = 0.5 * (((logs - prior.logs) / log_sd) ** 2).sum()
        fitted = 0.5 * seen @ cho_solve(factor, seen, check_finite=False)
        return float(fitted + np.log(np.diag(factor[0])).sum() + penalty)

    scales, weights = start, np.ones(len(recent))
    for _ in range(2):
        simplex = np.vstack([scales.logs, scales.logs + 0.5 * np.eye(4)])
        options = {"maxfev": 45, "initial_simplex": simplex}
        found = minimize(loss, scales.logs, (weights,), method="Nelder-Mead", options=options)
        scales = Scales(*map(float, np.exp(np.clip(found.x, -9, 1))))
        weights = Posterior(design, recent, scales).weights
    return scales
