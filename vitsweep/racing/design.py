"""The settings of cells as contrast-coded columns of a linear model, built for some cells at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

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
