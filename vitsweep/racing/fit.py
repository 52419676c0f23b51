"""Fits the scales of the model of a race to its runs, and says how sure they are.

The most probable scales maximize the marginal likelihood times log-normal priors. Taking them for the
truth (empirical Bayes) makes a race too sure of itself: after some dozens of runs, interactions and
residuals may be several times larger than they seem. So draws are taken for several scales: the points
of a cubature rule around the most probable ones (third-degree spherical-radial rule, Arasaratnam and
Haykin 2009, IEEE Transactions on Automatic Control 54, section III), along the axes of the curvature
there, each weighed by its true probability relative to the Gaussian, as in nested Laplace
approximations (Rue, Martino and Chopin 2009, Journal of the Royal Statistical Society B 71, section 3).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_solve
from scipy.optimize import minimize

from vitsweep.racing.design import Design, Floats
from vitsweep.racing.model import LOG_RANGE, Covariances, Mixture, Posterior, Runs, Scales, factor

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
