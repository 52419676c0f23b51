"""The grid of choices behind `tables.effects`: which columns of the model a cell and an effect have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import Series

Floats = NDArray[np.float64]


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
