"""A robust Bayesian mixed model of log throughput, from which joint draws of all cells are taken.

The log throughput of a run is

    y = block + cold (first run of a block) + main effects + pairwise interactions + residual of the
        cell + noise,

each term with an independent Gaussian prior: a linear mixed model, equivalently a Gaussian process
whose kernel is the sum of the terms' kernels (Rasmussen and Williams 2006, section 2.7). The noise is
Student's t with 4 degrees of freedom, as a scale mixture of Gaussians fitted by iterative reweighting
(Lange, Little and Taylor 1989), since some runs are slow for reasons of the machine. The four scales
(main effects, interactions, residual, noise) are not known either: several that go with the data are
weighed against each other (see `fit`). Draws are made by Matheron's rule: a draw of the prior plus its
correction towards the data (Wilson et al. 2020, arXiv:2002.09309), which needs no cells x cells matrix.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

from vitsweep.racing.design import USUAL_EFFECT, Design, Floats, Ints

DEGREES = 4.0
"""Of Student's t."""
BLOCK_SD, COLD_SD = 0.5, 0.1
"""Prior of a block's level, which is nearly flat, and of the first run of a block."""
CHUNK = 2000
"""Cells whose columns are in memory at a time."""
LOG_RANGE = (-9.0, 1.0)
"""Of the logarithm of a scale."""
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

    @classmethod
    def of_logs(cls, logs: Floats) -> "Scales":
        """Return scales from their logarithms, kept within `LOG_RANGE`."""
        return cls(*map(float, np.exp(np.clip(logs, *LOG_RANGE))))


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

    def __init__(
        self, design: Design, runs: Runs, scales: Scales, covariances: "Covariances | None" = None
    ) -> None:
        self.scales, self._design, self._runs = scales, design, runs
        covariances = covariances or Covariances.of(design, runs)  # the same for all scales
        self._main, self._pairs = covariances.main, covariances.pairs
        seen = runs.log - runs.log.mean()
        covariance = covariances.at(scales.logs)
        self.weights = np.ones(len(runs))
        variance = scales.noise**2
        for _ in range(PASSES):
            self._used = self.weights
            self._factor = factor(covariance, variance / self._used)
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


class Mixture:
    """Posteriors for several scales, each with the probability of its scales.

    Attributes:
        scales: the most probable ones.
        weights: of the runs, 1 for a usual one, towards 0 for one far off.
        mean: of each cell, log throughput, up to a constant.
    """

    def __init__(
        self, scales: Scales, parts: Sequence[Posterior], probabilities: Sequence[float]
    ) -> None:
        self.scales, self._parts = scales, parts
        self._shares = np.array(probabilities) / np.sum(probabilities)
        self.weights: Floats = np.average([p.weights for p in parts], axis=0, weights=self._shares)
        self.mean: Floats = np.average([p.mean for p in parts], axis=0, weights=self._shares)

    def draws(self, num: int, random: np.random.Generator) -> Callable[[Ints], Floats]:
        """Return a function from cells (a contiguous range) to their joint draws, cells x `num`.

        Each part has its share of the draws.
        """
        nums = np.diff(np.rint(num * np.cumsum(self._shares)).astype(int), prepend=0)
        drawn = [p.draws(int(n), random) for p, n in zip(self._parts, nums, strict=True) if n]
        return lambda cells: np.hstack([at(cells) for at in drawn])

    def chunks(self) -> Iterator[Ints]:
        """Yield all cells, some at a time."""
        return self._parts[0].chunks()


def factor(covariance: Floats, noise: Floats) -> tuple[Floats, bool]:
    """Return the Cholesky factor of the covariance of runs with the variances of their noise added."""
    whole = covariance.copy()
    whole[np.diag_indices(len(noise))] += noise
    found: tuple[Floats, bool] = cho_factor(whole, lower=True, overwrite_a=True, check_finite=False)
    return found


@dataclass(frozen=True, eq=False)
class Covariances:
    """Covariance of runs without their noise, for any scales.

    Attributes:
        main: runs x main effects.
        pairs: runs x pairwise interactions.
        of_effects: runs x runs, for main effects, pairs and residuals of variance 1.
        fixed: of what the scales have no part in, the blocks and their first runs.
    """

    main: Floats
    pairs: Floats
    of_effects: tuple[Floats, Floats, Floats]
    fixed: Floats

    @classmethod
    def of(cls, design: Design, runs: Runs) -> "Covariances":
        """Return those of some runs."""
        main, pairs = design.main(runs.cell), design.pairs(runs.cell)
        same_cell = (runs.cell[:, None] == runs.cell[None]).astype(float)
        same_block = runs.block[:, None] == runs.block[None]
        fixed = BLOCK_SD**2 * same_block + COLD_SD**2 * np.outer(runs.first, runs.first)
        return cls(main, pairs, (main @ main.T, pairs @ pairs.T, same_cell), fixed)

    def at(self, logs: Floats) -> Floats:
        """Return it for some scales, given as `Scales.logs`."""
        main, pairs, residual = self.of_effects
        variances = np.exp(2 * logs)
        return self.fixed + variances[0] * main + variances[1] * pairs + variances[2] * residual
