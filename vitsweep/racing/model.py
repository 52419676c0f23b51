"""A robust Bayesian mixed model of log throughput, from which joint draws of all cells are taken.

The log throughput of a run is

    y = block + cold (first run of a block) + main effects + pairwise interactions + residual of the
        cell + noise,

each term with an independent Gaussian prior: a linear mixed model, equivalently a Gaussian process
whose kernel is the sum of the terms' kernels (Rasmussen and Williams 2006, section 2.7). The noise is
Student's t with 4 degrees of freedom, as a scale mixture of Gaussians fitted by iterative reweighting
(Lange, Little and Taylor 1989), since some runs are slow for reasons of the machine. The four scales
(main effects, interactions, residual, noise) are not known either: several that go with the data are
weighed against each other (see `fit`).

A cell whose own runs agree that it is faster than its techniques explain stands for itself: its residual
gets a wide prior (the slab of a spike-and-slab prior, Mitchell and Beauchamp 1988). Else three runs of a
fast cell would count as three outliers of the noise. A cell that is slower than explained keeps the
narrow prior: machines make runs slow, and a cell whose estimate is too high is merely run again.

Draws are made by Matheron's rule: a draw of the prior plus its correction towards the data (Wilson et al.
2020, arXiv:2002.09309), which needs no cells x cells matrix.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.special import ndtri

# The settings of cells as contrast-coded columns of a linear model, built for some cells at a time.

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

USUAL_EFFECT = 0.08
"""Standard deviation of main effects before there are data, log throughput."""


@dataclass(frozen=True, eq=False)
class Design:
    """The factors of a grid.

    Attributes:
        levels: cells x factors, the level of each factor as a number from 0.
        predicted: log throughput of each cell as predicted before any run, up to a constant; None
            where there are no predictions. It is one more main effect, whose size the runs decide: a
            prediction that is right explains the cells by itself, one that is useless has no effect.
    """

    levels: Ints
    predicted: Floats | None = None

    @classmethod
    def of(cls, settings: Sequence[Mapping[str, str]], predicted: Floats | None = None) -> "Design":
        """Return the design of cells given as key -> value.

        A key without a value in some cell has a level of its own there. Keys that are the same in
        all cells, or that divide the cells as an earlier key does, add nothing and are left out.

        Args:
            settings: one mapping per cell.
            predicted: see `Design`.
        """
        columns: dict[tuple[int, ...], Ints] = {}
        for key in dict.fromkeys(key for cell in settings for key in cell):
            values = [cell.get(key, "") for cell in settings]
            numbers = {value: i for i, value in enumerate(dict.fromkeys(values))}
            level = tuple(numbers[value] for value in values)
            if len(numbers) > 1:
                columns.setdefault(level, np.array(level, np.int64))
        empty = np.zeros((len(settings), 0), np.int64)
        levels = np.column_stack(list(columns.values())) if columns else empty
        return cls(levels, None if predicted is None else predicted - predicted.mean())

    @property
    def num_cells(self) -> int:
        """Number of cells."""
        return len(self.levels)

    @property
    def num_main(self) -> int:
        """Number of columns of `main`."""
        return sum(code.shape[1] for code in self._codes) + (self.predicted is not None)

    @property
    def num_pairs(self) -> int:
        """Number of columns of `pairs`."""
        widths = [code.shape[1] for code in self._codes]
        return sum(a * b for a, b in combinations(widths, 2))

    @cached_property
    def _codes(self) -> list[Floats]:
        """Return levels x (levels - 1) orthogonal contrasts of each factor, each of mean square 1."""
        found = []
        for column in self.levels.T:
            num = int(column.max()) + 1
            with_mean = np.c_[np.ones(num), np.eye(num)[:, 1:]]
            found.append(np.linalg.qr(with_mean)[0][:, 1:] * np.sqrt(num))
        return found

    def main(self, cells: Ints) -> Floats:
        """Return cells x main effects."""
        coded = self._coded(cells)
        if self.predicted is not None:  # a right one has the coefficient of a usual effect
            coded.append(self.predicted[cells, None] / USUAL_EFFECT)
        return np.hstack(coded) if coded else np.zeros((len(cells), 0))

    def pairs(self, cells: Ints) -> Floats:
        """Return cells x pairwise interactions."""
        coded, num = self._coded(cells), len(cells)
        products = [
            (a[:, :, None] * b[:, None, :]).reshape(num, -1) for a, b in combinations(coded, 2)
        ]
        return np.hstack(products) if products else np.zeros((num, 0))

    def _coded(self, cells: Ints) -> list[Floats]:
        levels = self.levels[cells].T
        return [code[level] for code, level in zip(self._codes, levels, strict=True)]


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
LEAST_RUNS_ALONE, ALONE_SD, ALONE_LEVEL = 3, 0.2, 0.05
"""Runs of a cell that stands for itself, its prior, and the chance that any cell does so by its noise."""
MEDIAN_SD = 1.2533
"""Standard deviation of a median of Gaussian values, over that of their mean."""


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
        self._own_variance = scales.residual**2 + ALONE_SD**2 * covariances.alone
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
        own = np.sqrt(self._own_variance)[:, None] * random.normal(size=(len(self.mean), num))
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
        return s.main**2 * main + s.pairs**2 * pairs + self._own_variance[cells, None] * own

    def stand_alone(self) -> NDArray[np.bool_]:
        """Return which cells are faster in their own runs than techniques and noise explain."""
        runs, num_cells = self._runs, len(self.mean)
        own = self._own_variance * np.bincount(runs.cell, self._solved, num_cells)
        unexplained, found = self.residuals + own[runs.cell], np.zeros(num_cells, bool)
        limit = -ndtri(ALONE_LEVEL / num_cells) * MEDIAN_SD * self.scales.noise
        for cell in np.flatnonzero(np.bincount(runs.cell) >= LEAST_RUNS_ALONE):
            values = unexplained[runs.cell == cell]
            found[cell] = np.median(values) > limit / np.sqrt(len(values))
        return found


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
        fixed: of what the scales have no part in: blocks, their first runs, cells that stand for themselves.
        alone: of each cell, whether it stands for itself.
    """

    main: Floats
    pairs: Floats
    of_effects: tuple[Floats, Floats, Floats]
    fixed: Floats
    alone: NDArray[np.bool_]

    @classmethod
    def of(
        cls, design: Design, runs: Runs, alone: NDArray[np.bool_] | None = None
    ) -> "Covariances":
        """Return those of some runs; `alone` says which cells stand for themselves, none by default."""
        alone = np.zeros(design.num_cells, bool) if alone is None else alone
        main, pairs = design.main(runs.cell), design.pairs(runs.cell)
        same_cell = (runs.cell[:, None] == runs.cell[None]).astype(float)
        same_block = runs.block[:, None] == runs.block[None]
        fixed = BLOCK_SD**2 * same_block + COLD_SD**2 * np.outer(runs.first, runs.first)
        fixed += ALONE_SD**2 * same_cell * alone[runs.cell]
        return cls(main, pairs, (main @ main.T, pairs @ pairs.T, same_cell), fixed, alone)

    def at(self, logs: Floats) -> Floats:
        """Return it for some scales, given as `Scales.logs`."""
        main, pairs, residual = self.of_effects
        variances = np.exp(2 * logs)
        return self.fixed + variances[0] * main + variances[1] * pairs + variances[2] * residual


# Fits the scales of the model of a race to its runs, and says how sure they are.
#
# The most probable scales maximize the marginal likelihood times log-normal priors. Taking them for the
# truth (empirical Bayes) makes a race too sure of itself: after some dozens of runs, interactions and
# residuals may be several times larger than they seem. So draws are taken for several scales: the points
# of a cubature rule around the most probable ones (third-degree spherical-radial rule, Arasaratnam and
# Haykin 2009, IEEE Transactions on Automatic Control 54, section III), along the axes of the curvature
# there, each weighed by its true probability relative to the Gaussian, as in nested Laplace
# approximations (Rue, Martino and Chopin 2009, Journal of the Royal Statistical Society B 71, section 3).


GROWTH, FIRST_FIT, MOST_ROWS = 1.4, 24, 350
"""The scales are fitted to the first 24 runs, then each time the data have grown by 1.4, to at most the
latest 350."""
SMOOTH, RUGGED = (Scales(), 0.7), (Scales(residual=0.02), 0.3)
"""Prior scales, and the standard deviation of the log of the residual's: where nearly every cell is run,
and where most never are. A cell that never ran shows nothing of its own residual, so that the model must
not be sure of a small one from the few that did."""
OTHER_LOG_SD = 1.0
"""The same for the other three scales."""
STEP = 0.25
"""Of the differences that give the curvature, in the logarithm of a scale."""


@dataclass(frozen=True)
class FittedScales:
    """Scales that go with the data.

    Attributes:
        best: the most probable ones.
        around: points around them.
        probabilities: of these points, up to a factor.
    """

    best: Scales
    around: tuple[Scales, ...]
    probabilities: tuple[float, ...]


class Model:
    """Fits the model to growing data.

    What it returns depends on the design and the runs alone, so that an interrupted race goes on as
    it would have gone; fitted scales are kept between calls only to save time.

    Args:
        design: of all cells.
    """

    def __init__(self, design: Design) -> None:
        self.design = design
        self._fitted: dict[int, FittedScales] = {}

    def posterior(self, runs: Runs) -> Mixture:
        """Return what the runs say, two at least.

        Args:
            runs: all of them, oldest first.
        """
        fitted = self._scales(runs)
        covariances = Covariances.of(self.design, runs)
        alone = Posterior(self.design, runs, fitted.best, covariances).stand_alone()
        if alone.any():
            covariances = Covariances.of(self.design, runs, alone)
        parts = [Posterior(self.design, runs, scales, covariances) for scales in fitted.around]
        return Mixture(fitted.best, parts, fitted.probabilities)

    def _scales(self, runs: Runs) -> FittedScales:
        prior, residual_log_sd = RUGGED if self.design.num_cells > 1000 else SMOOTH
        log_sd = np.array([OTHER_LOG_SD, OTHER_LOG_SD, residual_log_sd, OTHER_LOG_SD])
        sizes = [min(FIRST_FIT, len(runs))]
        while (size := round(sizes[-1] * GROWTH)) <= len(runs):
            sizes.append(size)
        fitted = FittedScales(prior, (), ())
        for size in sizes:
            # keyed by the number of runs: runs are only ever added
            known = self._fitted.get(size)
            fitted = known or _fit(
                self.design, runs.part(slice(0, size)), fitted.best, prior, log_sd
            )
            if size >= FIRST_FIT:
                self._fitted[size] = fitted
        return fitted


def _fit(design: Design, runs: Runs, start: Scales, prior: Scales, log_sd: Floats) -> FittedScales:
    """Maximize marginal likelihood times prior twice, with the runs reweighted between, and look around."""
    recent = runs.part(slice(max(len(runs) - MOST_ROWS, 0), None))
    seen = recent.log - recent.log.mean()
    covariances = Covariances.of(design, recent)

    def loss(logs: Floats, weights: Floats) -> float:
        """Return the negative logarithm of the scales' probability, up to a constant."""
        inside = np.clip(logs, *LOG_RANGE)
        cholesky = factor(covariances.at(inside), np.exp(2 * inside[3]) / weights)
        penalty = 0.5 * (((logs - prior.logs) / log_sd) ** 2).sum()
        fitted = 0.5 * seen @ cho_solve(cholesky, seen, check_finite=False)
        return float(fitted + np.log(np.diag(cholesky[0])).sum() + penalty)

    best, weights = start, np.ones(len(recent))
    from scipy.optimize import minimize  # takes half a second

    for _ in range(2):
        simplex = np.vstack([best.logs, best.logs + 0.5 * np.eye(4)])
        options = {"maxfev": 45, "initial_simplex": simplex}
        found = minimize(loss, best.logs, (weights,), method="Nelder-Mead", options=options)
        best, used = Scales.of_logs(found.x), weights
        weights = Posterior(design, recent, best, covariances).weights
    return _around(
        best, lambda logs: loss(logs, used), least_curvature=float(1 / log_sd.max() ** 2)
    )


def _around(best: Scales, loss: Callable[[Floats], float], least_curvature: float) -> FittedScales:
    """Return the points of the cubature rule around the most probable scales, and their probabilities."""
    curvature, axes = np.linalg.eigh(_curvature(loss, best.logs))
    num = len(axes)
    # n dimensions: 2n points of equal weight at the distance sqrt(n)
    steps = np.sqrt(num) * axes / np.sqrt(np.maximum(curvature, least_curvature))
    points = [Scales.of_logs(best.logs + sign * step) for step in steps.T for sign in (1, -1)]
    losses = np.array([loss(point.logs) for point in points])
    return FittedScales(best, tuple(points), tuple(np.exp(losses.min() - losses)))


def _curvature(loss: Callable[[Floats], float], at: Floats) -> Floats:
    """Return the second derivatives of a function by differences."""
    steps = STEP * np.eye(len(at))
    middle = loss(at)
    up, down = ([loss(at + sign * step) for step in steps] for sign in (1, -1))
    found = np.diag([a + b - 2 * middle for a, b in zip(up, down, strict=True)])
    for i in range(len(at)):
        for j in range(i):
            both = loss(at + steps[i] + steps[j])
            found[i, j] = found[j, i] = both - up[i] - up[j] + middle
    return found / STEP**2
