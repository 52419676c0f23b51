"""Simulated landscapes of throughput, and machines that measure blocks of their cells."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from vitsweep.extras.race.halving import Runs

Floats = NDArray[np.float64]

KINDS = ("smooth", "rugged", "carry_over", "three_way", "lone")
"""Of landscapes and machines, see `benchmarks.racing`."""
NUM_LEVELS = {96: [2] * 5 + [3], 2000: [2] * 8 + [3] * 2}
"""Number of cells -> choices of each technique."""


@dataclass(frozen=True)
class Landscape:
    """The truth: log throughput of each cell, cell 0 being the baseline."""

    truth: Floats
    carry_over: Floats | None = None
    """Log of what a cell does to the throughput of the run after it, such as heat or a full page cache."""

    @classmethod
    def drawn(
        cls, cells: int, kind: str, random: np.random.Generator, lone: float = 0.08
    ) -> "Landscape":
        """Draw one; of a grid with more combinations than cells, the others do not exist.

        Args:
            cells: number of them.
            kind: one of `KINDS`.
            random: for all draws.
            lone: of the kind `lone`, by how much one cell is faster than all others; 0.08 is 8 %.
        """
        num_levels = NUM_LEVELS[cells]
        levels = np.array(list(product(*map(range, num_levels))))
        if len(levels) > cells:
            rest = random.choice(np.arange(1, len(levels)), cells - 1, replace=False)
            levels = levels[np.r_[0, np.sort(rest)]]
        truth = random.normal(0, 0.025 if kind == "rugged" else 0.007, cells)
        for factor, num in enumerate(num_levels):
            effect = np.r_[0, 0.06 * random.standard_t(3, num - 1)].clip(-0.5, 0.5)
            truth += effect[levels[:, factor]]
        for a, b in combinations(range(len(num_levels)), 2):
            if random.random() < 0.25:
                both = random.normal(0, 0.04, (num_levels[a], num_levels[b]))
                both[0], both[:, 0] = 0, 0
                truth += both[levels[:, a], levels[:, b]]
        if kind == "three_way":
            for chosen in combinations(range(len(num_levels)), 3):
                if random.random() < 0.25:
                    truth += random.normal(0, 0.06) * (levels[:, chosen] > 0).all(axis=1)
        if kind == "lone":
            truth[random.integers(1, cells)] = truth.max() + np.log1p(lone)
        carry_over = random.normal(0, 0.03, cells) if kind == "carry_over" else None
        return cls(truth, carry_over)

    def loss(self, cell: int) -> float:
        """Return how far a cell is below the best, log throughput."""
        return float(self.truth.max() - self.truth[cell])


@dataclass
class Machine:
    """Measures blocks of a landscape, with the faults of real machines."""

    landscape: Landscape
    noise: float
    random: np.random.Generator
    slow: float = 0.1
    """Share of the runs that are 15 % slow."""
    cold: float = 0.06
    """By which the first run of a block is slower."""
    level: float = 0.0
    _rows: list[tuple[int, int, float]] = field(default_factory=list)

    def block(self, cells: Iterable[int]) -> None:
        """Run some cells in a random order."""
        random = self.random
        order = random.permutation(np.array(list(dict.fromkeys(cells))))
        num = len(order)
        self.level += random.normal(0, 0.03)
        log = self.landscape.truth[order] + self.level
        log += random.normal(0, 0.01) * np.linspace(-0.5, 0.5, num)
        log += random.normal(0, self.noise, num)
        log += np.log(0.85) * (random.random(num) < self.slow)
        if self.landscape.carry_over is not None:
            log[1:] += self.landscape.carry_over[order[:-1]]
        log[0] += np.log1p(-self.cold)
        number = str(self._rows[-1][1] + 1 if self._rows else 0)
        self._rows += [(int(c), int(number), float(y)) for c, y in zip(order, log, strict=True)]

    @property
    def runs(self) -> Runs:
        """All runs so far."""
        cell, block, log = (
            map(np.array, zip(*self._rows, strict=True)) if self._rows else [np.zeros(0)] * 3
        )
        return Runs(cell.astype(np.int64), block.astype(str), log)
