"""Simulated landscapes of throughput and peak memory, and machines that measure blocks of their cells."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from vitsweep.racing.model import Design, Ints, Runs

Floats = NDArray[np.float64]

KINDS = ("smooth", "rugged", "lone", "three_way", "carry_over", "uneven_noise")
"""Of landscapes and machines, see `benchmarks.racing`."""
NUM_LEVELS = {96: [2] * 5 + [3], 2000: [2] * 8 + [3] * 2}
"""Number of cells -> choices of each technique."""
COST_NOISE = 0.005
"""Of one measurement of peak memory."""


@dataclass(frozen=True)
class Landscape:
    """The truth: log throughput of each cell, cell 0 being the baseline."""

    truth: Floats
    levels: Ints
    cost: Floats | None = None
    """Log of peak memory, in a landscape with a front."""
    carry_over: Floats | None = None
    """Log of what a cell does to the throughput of the run after it, such as heat or a full page cache."""
    noise_factor: Floats | None = None
    """By which the noise of each cell is larger than that of the machine."""

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
        noise_factor = np.exp(random.normal(0, 0.7, cells)) if kind == "uneven_noise" else None
        return cls(truth, levels, carry_over=carry_over, noise_factor=noise_factor)

    def with_cost(self, random: np.random.Generator) -> "Landscape":
        """Return the landscape with a peak memory of each cell."""
        cost = random.normal(0, 0.01, len(self.truth))
        for column in self.levels.T:
            if random.random() < 0.5:
                cost += np.r_[0, random.normal(0, 0.2, int(column.max()))][column]
        return replace(self, cost=cost)

    def loss(self, cell: int) -> float:
        """Return how far a cell is below the best, log throughput."""
        return float(self.truth.max() - self.truth[cell])

    def front_loss(self, front: Sequence[int]) -> float:
        """Return how far a front is from the true one, log of a ratio; 0 where it is right."""
        assert self.cost is not None
        members = list(front)
        faster = self.truth[:, None] - self.truth[members]
        leaner = self.cost[members] - self.cost[:, None]
        uncovered = np.maximum(faster, leaner).min(axis=1).max()
        return float(max(uncovered, np.minimum(faster, leaner).max(), 0.0))

    def predicted(self, kind: str | None, random: np.random.Generator) -> Floats | None:
        """Return predictions of the log throughput."""
        if kind is None:
            return None
        if kind == "useless":
            return random.permutation(self.truth)
        design = Design.of([{str(f): str(v) for f, v in enumerate(row)} for row in self.levels])
        main = design.main(np.arange(len(self.truth)))
        effects = np.linalg.lstsq(main, self.truth - self.truth.mean(), rcond=None)[0]
        wrong = main @ (effects * random.normal(0, 0.5, len(effects)))
        return self.truth + wrong + random.normal(0, 0.10, len(self.truth))


@dataclass
class Machine:
    """Measures blocks of a landscape, with the faults of real machines."""

    landscape: Landscape
    noise: float
    random: np.random.Generator
    level: float = 0.0
    _rows: list[tuple[int, int, float, float, float]] = field(default_factory=list)

    def block(self, cells: Iterable[int], most: int | None = None) -> None:
        """Run some cells in a random order, only the first `most` of them where the block is cut off."""
        random = self.random
        order = random.permutation(np.array(list(dict.fromkeys(cells))))[:most]
        num = len(order)
        self.level += random.normal(0, 0.03)
        log = self.landscape.truth[order] + self.level
        log += random.normal(0, 0.01) * np.linspace(-0.5, 0.5, num)
        factor = 1.0 if self.landscape.noise_factor is None else self.landscape.noise_factor[order]
        log += factor * random.normal(0, self.noise, num)
        log += np.log(0.85) * (random.random(num) < 0.10)
        if self.landscape.carry_over is not None:
            log[1:] += self.landscape.carry_over[order[:-1]]
        log[0] += np.log(0.94)
        number = self._rows[-1][1] + 1 if self._rows else 0
        cost = np.zeros(num)
        if self.landscape.cost is not None:
            cost = self.landscape.cost[order] + random.normal(0, COST_NOISE, num)
        self._rows += [
            (int(c), number, float(i == 0), y, m)
            for i, (c, y, m) in enumerate(zip(order, log, cost, strict=True))
        ]

    @property
    def num_runs(self) -> int:
        """Runs so far."""
        return len(self._rows)

    @property
    def runs(self) -> Runs:
        """All runs so far."""
        cell, block, first, log, cost = (
            map(np.array, zip(*self._rows, strict=True)) if self._rows else [np.zeros(0)] * 5
        )
        log_cost = None if self.landscape.cost is None else cost
        return Runs(cell.astype(np.int64), block.astype(np.int64), first, log, log_cost)

    def mean_ratios(self) -> Floats:
        """Return each cell's mean log ratio to the baseline of its blocks; -inf where it never ran."""
        runs, num = self.runs, len(self.landscape.truth)
        base = np.zeros(int(runs.block.max()) + 1)
        of_base = runs.cell == 0
        base[runs.block[of_base]] = runs.log[of_base]
        counts = np.bincount(runs.cell, minlength=num)
        sums = np.bincount(runs.cell, runs.log - base[runs.block], minlength=num)
        return np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)

    def mean_costs(self) -> Floats:
        """Return each cell's mean log peak memory; 0 where it never ran."""
        runs, num = self.runs, len(self.landscape.truth)
        assert runs.log_cost is not None
        counts = np.bincount(runs.cell, minlength=num)
        return np.bincount(runs.cell, runs.log_cost, minlength=num) / np.maximum(counts, 1)
