"""A mixed model of the cells of a grid: main effects, random interactions, random rests of cells.

With q the within-block information about the cells' logs (see `within_blocks`), whitened so that
its noise is independent: q = T (X b + Z g + d) + e, var g = interaction^2, var d = rest^2,
var e = noise^2. T has one row per direction in which blocks compare cells, so T T' is diagonal and
everything costs cells x interactions^2 after one eigendecomposition.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import Series

from vitsweep.tables.blocks import WithinBlocks
from vitsweep.tables.stats import minimized, solve_positive

Floats = NDArray[np.float64]

LARGEST_SPREAD = 3.0
"""Log throughput: no technique interacts by more than a factor of e^3."""
SMALLEST_SPREAD = 1e-5
"""Below the resolution of any clock; keeps the model defined where runs are equal to the last bit."""
USUAL_REST, REST_LOG_SPREAD = 0.01, 0.7
"""Prior of the spread of the cells' rests, log-normal: interactions of three and more techniques
move a cell by about 1 %. It decides where a grid is too small to show them."""


@dataclass(frozen=True, eq=False)
class MixedFit:
    """The fitted model; `predict` gives any weighted sum of its parameters with its error.

    Attributes:
        main: T X, directions x main effects.
        both: T Z, directions x interactions.
        turned: T, directions x cells.
        seen: q, one number per direction.
        noise: standard deviation of one run's log(images/s).
        interaction: standard deviation of the interaction parameters; 0 where there are none.
        rest: standard deviation of what a cell has beyond its main effects and interactions.
        data: what was fitted.
    """

    main: Floats
    both: Floats
    turned: Floats
    seen: Floats
    noise: float
    interaction: float
    rest: float
    data: WithinBlocks

    @property
    def spreads(self) -> dict[str, float]:
        """Standard deviations of log(images/s): `noise, interaction, rest`."""
        return {"noise": self.noise, "interaction": self.interaction, "rest": self.rest}

    def predict(
        self, main: Floats, both: Floats, cells: Floats, unseen: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return estimate, standard error, degrees of weighted sums of main effects, interactions, rests.

        Best linear unbiased prediction: estimate a'b + g'V^-1 (q - T X b) with g the covariance of the
        random part and q; the error is that of the prediction, not of the mean of the model
        (Henderson 1975). What noise adds to it is taken from the blocks
        (`WithinBlocks.variance_over_blocks`). NaN where the main effects in a sum cannot be told apart.

        Args:
            main: sums x main effects, the weights.
            both: sums x interactions.
            cells: sums x cells, on the rests of the measured cells.
            unseen: sum of squared weights on the rests of cells that were not measured.
        """
        covariance = self.interaction**2 * (self.both @ both.T) + self.rest**2 * (
            self.turned @ cells.T
        )
        solved = self._weighted(covariance)
        misfit = self.seen - self.main @ self._coefficients
        estimate = main @ self._coefficients + solved.T @ misfit
        of_rests = self.rest**2 * ((cells**2).sum(axis=1) + unseen)
        prior = self.interaction**2 * (both**2).sum(axis=1) + of_rests
        left = main.T - self.main.T @ solved
        variance = (
            prior
            - (covariance * solved).sum(axis=0)
            + (left * (self._inverse_of_main @ left)).sum(axis=0)
        )
        on_seen = solved + self._weighted(self.main) @ self._inverse_of_main @ left
        values, vectors = self.data.spectrum
        noise, degrees = self.data.variance_over_blocks(on_seen.T / np.sqrt(values) @ vectors.T)
        others = np.maximum(variance - self.noise**2 * (on_seen**2).sum(axis=0), 0.0)
        total = noise + others
        spread = noise**2 / degrees + others**2 / max(self.data.degrees, 1)
        known = np.linalg.norm(main - main @ self._projection, axis=1) < 1e-6
        return (
            np.where(known, estimate, np.nan),
            np.where(known, np.sqrt(total), np.nan),
            np.where(spread > 0, total**2 / np.where(spread > 0, spread, 1.0), 1.0),
        )

    @cached_property
    def _diagonal(self) -> Floats:
        diagonal: Floats = self.noise**2 + self.rest**2 * (self.turned**2).sum(axis=1)
        return diagonal

    def _weighted(self, values: Floats) -> Floats:
        """Return V^-1 times the columns of `values` (Woodbury)."""
        return _solve(self._diagonal, self.both * self.interaction, values)

    @cached_property
    def _inverse_of_main(self) -> Floats:
        precision = self.main.T @ self._weighted(self.main)
        return np.asarray(np.linalg.pinv(precision, rcond=1e-10, hermitian=True), float)

    @cached_property
    def _coefficients(self) -> Floats:
        found: Floats = self._inverse_of_main @ (self.main.T @ self._weighted(self.seen))
        return found

    @cached_property
    def _projection(self) -> Floats:
        """Projects weights on main effects onto those that the data determine."""
        found: Floats = np.linalg.pinv(self.main, rcond=1e-8) @ self.main
        return found


def fit_mixed_model(data: WithinBlocks, main: Floats, both: Floats) -> MixedFit:
    """Fit the three standard deviations by penalised restricted maximum likelihood.

    The likelihood is that of q beyond its main effects, times that of the residual sum of squares
    of repeated runs. The penalty log(interaction) keeps that spread from an estimate of 0 (Chung et
    al. 2013, Psychometrika 78, equation 9); the rest has a log-normal prior.

    Args:
        data: cells with the effects of blocks taken out.
        main: cells x main effects.
        both: cells x interactions.
    """
    values, vectors = data.spectrum
    turned = np.sqrt(values)[:, None] * vectors.T
    seen = (vectors.T @ data.total) / np.sqrt(values)
    fixed, random = turned @ main, turned @ both
    rank = int(np.linalg.matrix_rank(fixed, tol=1e-8)) if fixed.size else 0
    has_both = int(np.linalg.matrix_rank(np.hstack([fixed, random]), tol=1e-8)) > rank
    basis = np.linalg.svd(fixed, full_matrices=False)[0][:, :rank]

    def deviance(logs: Floats) -> float:
        noise, interaction, rest = np.exp(logs) * (1.0, has_both, 1.0)
        diagonal = noise**2 + rest**2 * values
        scaled = random * interaction
        solved = _solve(diagonal, scaled, np.column_stack([seen, basis]))
        of_basis = basis.T @ solved[:, 1:]
        cross = solved[:, 1:].T @ seen
        fit = seen @ solved[:, 0] - cross @ np.linalg.solve(of_basis, cross)
        inner = np.eye(scaled.shape[1]) + scaled.T @ (scaled / diagonal[:, None])
        total = np.log(diagonal).sum() + np.linalg.slogdet(inner)[1]
        total += np.linalg.slogdet(of_basis)[1] + fit
        total += 2 * data.degrees * logs[0] + data.residual / noise**2
        prior = 2 * has_both * logs[1] - ((logs[2] - np.log(USUAL_REST)) / REST_LOG_SPREAD) ** 2
        return float(total - prior)

    guess = max(data.noise if data.degrees else float(np.std(seen)), 10 * SMALLEST_SPREAD)
    start = np.log([guess, guess, USUAL_REST])
    bounds = [(np.log(SMALLEST_SPREAD), np.log(LARGEST_SPREAD))] * 3
    noise, interaction, rest = np.exp(minimized(deviance, start, bounds)) * (1.0, has_both, 1.0)
    return MixedFit(fixed, random, turned, seen, noise, interaction, rest, data)


def _solve(diagonal: Floats, scaled: Floats, values: Floats) -> Floats:
    """Return (diag + scaled scaled')^-1 values by Woodbury's identity."""
    columns = values if values.ndim == 2 else values[:, None]
    divided = columns / diagonal[:, None]
    if scaled.shape[1]:
        weighted = scaled / diagonal[:, None]
        inner = np.eye(scaled.shape[1]) + scaled.T @ weighted
        divided = divided - weighted @ solve_positive(inner, scaled.T @ divided)
    solved: Floats = divided if values.ndim == 2 else divided[:, 0]
    return solved


# The grid of choices behind `tables.effects`: which columns of the model a cell and an effect have.


@dataclass(frozen=True, eq=False)
class Factor:
    """One column of the grid: its choices, the reference, and the choice of every cell."""

    names: list[str]
    reference: int
    codes: NDArray[np.int64]

    @classmethod
    def of(cls, values: "Series[str]", reference: str) -> "Factor":
        """Return the factor of a column of texts, its choices in the order of their appearance."""
        names = list(dict.fromkeys(values))
        return cls(names, names.index(reference), values.map(names.index).to_numpy(np.int64))

    @property
    def contrasts(self) -> Floats:
        """Levels x (levels - 1): orthonormal columns that sum to 0, so that no level is special."""
        values, vectors = np.linalg.eigh(np.eye(len(self.names)) - 1 / len(self.names))
        basis: Floats = vectors[:, values > 0.5]
        return basis


@dataclass(frozen=True, eq=False)
class Effect:
    """One effect as weights on the parameters of the model.

    It is the mean over `num_combinations` of the other choices of one level minus its reference;
    `unseen` of the 2 x `num_combinations` cells were not measured.
    """

    main: Floats
    both: Floats
    cells: Floats
    num_combinations: int
    unseen: int

    @property
    def weights(self) -> tuple[Floats, Floats, Floats, float]:
        """Return what `MixedFit.predict` takes: main, both, cells, sum of squares of the unseen."""
        return self.main, self.both, self.cells, self.unseen / self.num_combinations**2

    def less(self, average: "Effect") -> tuple[Floats, Floats, Floats, float]:
        """Return the weights of this effect minus one whose combinations hold all of its own."""
        mine, whole = 1 / self.num_combinations, 1 / average.num_combinations
        unseen = self.unseen * (mine - whole) ** 2 + (average.unseen - self.unseen) * whole**2
        main, both = self.main - average.main, self.both - average.both
        return main, both, self.cells - average.cells, unseen


@dataclass(frozen=True, eq=False)
class Grid:
    """The factors of the measured cells, and the columns of the model that they make."""

    factors: dict[str, Factor]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Names of every two factors."""
        return list(combinations(self.factors, 2))

    @property
    def main(self) -> Floats:
        """Cells x main effects."""
        return np.column_stack([f.contrasts[f.codes] for f in self.factors.values()])

    @property
    def both(self) -> Floats:
        """Cells x interactions: products of the columns of two factors."""
        coded = {name: f.contrasts[f.codes] for name, f in self.factors.items()}
        parts = [np.einsum("ni,nj->nij", coded[a], coded[b]) for a, b in self.pairs]
        num_cells = len(next(iter(self.factors.values())).codes)
        return np.hstack([np.zeros((num_cells, 0)), *(p.reshape(num_cells, -1) for p in parts)])

    def measured_with_both(self, column: str, level: int, other: str) -> list[int]:
        """Return the levels of `other` with which both the level and its reference were measured."""
        factor, codes = self.factors[column], self.factors[other].codes
        sides = [set(codes[factor.codes == i].tolist()) for i in (level, factor.reference)]
        return sorted(sides[0] & sides[1])

    def effect(self, column: str, level: int, shared: Mapping[str, Sequence[int]]) -> Effect:
        """Return the effect of a level over the product of the levels `shared` of the others."""
        factor = self.factors[column]
        contrasts = {name: f.contrasts for name, f in self.factors.items()}
        difference = contrasts[column][level] - contrasts[column][factor.reference]
        nothing = {name: np.zeros(c.shape[1]) for name, c in contrasts.items()}
        main = [difference if name == column else nothing[name] for name in self.factors]
        mean = {name: contrasts[name][list(kept)].mean(axis=0) for name, kept in shared.items()}
        sides = {
            pair: tuple(difference if name == column else mean[name] for name in pair)
            if column in pair
            else tuple(nothing[name] for name in pair)
            for pair in self.pairs
        }
        both = [np.outer(*sides[pair]).ravel() for pair in self.pairs]
        num_combinations = int(np.prod([len(kept) for kept in shared.values()], dtype=int))
        inside = np.ones(len(factor.codes), dtype=bool)
        for name, kept in shared.items():
            inside &= np.isin(self.factors[name].codes, kept)
        sign = 1.0 * (factor.codes == level) - (factor.codes == factor.reference)
        cells = self._shared_out(sign * inside, shared) / num_combinations
        seen = len({(s, *c) for s, *c in self._places(sign * inside, shared)})
        return Effect(
            np.concatenate(main),
            np.concatenate([np.zeros(0), *both]),
            cells,
            num_combinations,
            2 * num_combinations - seen,
        )

    def _places(self, sign: Floats, shared: Mapping[str, Any]) -> list[tuple[float, ...]]:
        rows = np.flatnonzero(sign)
        codes = [self.factors[name].codes[rows] for name in shared]
        return list(zip(sign[rows].tolist(), *(c.tolist() for c in codes), strict=True))

    def _shared_out(self, sign: Floats, shared: Mapping[str, Any]) -> Floats:
        """Divide the weight of a combination among the cells that have it."""
        places = self._places(sign, shared)
        how_many = {place: places.count(place) for place in set(places)}
        weights = sign.copy()
        weights[np.flatnonzero(sign)] /= [how_many[place] for place in places]
        return weights
