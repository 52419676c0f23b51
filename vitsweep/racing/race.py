"""The race as a pure function: all runs so far in, the next blocks or the reason to stop out.

A race begins with some blocks that cover the cells at random, each once. Then, round after round, the
model is fitted to all runs, and `rules` says who runs next. Nothing is kept between rounds: an
interrupted race continues from its stored runs as if it had not been interrupted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from vitsweep.racing.conclusions import Verdict, judge, judge_front, proposals
from vitsweep.racing.design import Design, Ints
from vitsweep.racing.model import Model, Runs

LEAST_START_BLOCKS = 4
NEVER = 2**62
"""The block in which a cell leaves that is still in the race."""


class Phase(StrEnum):
    """Where a race stands."""

    start = "start"  # cells are covered at random
    race = "race"
    settled = "settled"
    alone = "alone"  # no second cell is left to compare with


@dataclass(frozen=True)
class Step:
    """What a race wants next.

    Attributes:
        phase: where the race stands.
        blocks: cells of the next blocks, not yet in an order; empty where the race is over.
        verdicts: after each round, oldest first; empty during the start.
    """

    phase: Phase
    blocks: Sequence[Sequence[int]] = ()
    verdicts: Sequence[Verdict] = ()

    @property
    def verdict(self) -> Verdict | None:
        """What all runs say; None during the start."""
        return self.verdicts[-1] if self.verdicts else None


@dataclass
class Race:
    """One race.

    Attributes:
        design: settings of the cells.
        baseline_of: number of each cell's baseline, -1 where it has none; a block holds the leader's.
        block_size: runs of a block, that of the baseline among them.
        indifference: gains below it do not matter: 0.02 is 2 %.
        seed: of all random numbers of the race.
        at_once: blocks of a round at least; a cluster runs them at the same time.
        starts_with_all: whether the start runs every cell once, not just enough cells to tell effects apart.
    """

    design: Design
    baseline_of: Ints
    block_size: int
    indifference: float = 0.02
    seed: int = 0
    at_once: int = 1
    starts_with_all: bool = False
    _model: Model = field(init=False)
    _cost_model: Model = field(init=False)
    _judged: dict[tuple[bytes, ...], Verdict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._model, self._cost_model = Model(self.design), Model(self.design)

    @cached_property
    def num_start_blocks(self) -> int:
        """Blocks that cover the cells at random before the model decides.

        About as many runs as the model has effects, so that it can tell them apart, but no more than
        two runs of each cell. `LEAST_START_BLOCKS` in any case: from fewer runs of the same cell the
        noise is not known, and cells would be dropped by chance.
        """
        beside = self._cells_beside
        if self.starts_with_all:
            return max(LEAST_START_BLOCKS, -(-self.design.num_cells // beside))
        for_effects = (self.design.num_main + self.design.num_pairs) // self.block_size + 2
        twice = -(-2 * self.design.num_cells // beside)
        return max(LEAST_START_BLOCKS, min(for_effects, twice))

    def next(self, runs: Runs, left: Ints) -> Step:
        """Return what to run next, or why nothing is.

        Args:
            runs: measured so far, oldest first.
            left: number of the block in which each cell left the race because it failed or is not
                allowed; `NEVER` for the others.
        """
        out, done = left < NEVER, runs.num_blocks
        if (~out).sum() < 2:
            return Step(Phase.alone)
        if done < self.num_start_blocks:
            return Step(Phase.start, self._start(runs, out, self.num_start_blocks - done))
        verdicts = self.verdicts(runs, left)
        verdict = verdicts[-1]
        if len(verdicts) > 1 and all(v.is_settled for v in verdicts[-2:]):
            return Step(Phase.settled, verdicts=verdicts)
        baseline = int(self.baseline_of[verdict.leader])
        always = [baseline] * (baseline >= 0 and not out[baseline]) + [verdict.leader]
        blocks = proposals(verdict, np.array(always), self.block_size, self._num_blocks(done))
        return Step(Phase.race, blocks, verdicts)

    def verdicts(self, runs: Runs, left: Ints) -> list[Verdict]:
        """Return what the runs said after each round, and after all of them; the same for the same runs.

        Each verdict judges all cells anew: had a cell to stay dropped, the chances of error of all rounds
        would add up. Where rounds end is a function of the number of blocks, so that the rounds of an
        interrupted race are found again.
        """
        ends = [self.num_start_blocks]
        while (end := ends[-1] + self._num_blocks(ends[-1])) < runs.num_blocks:
            ends.append(end)
        if runs.num_blocks > ends[-1]:
            ends.append(runs.num_blocks)
        return [
            self._verdict(
                runs.part(runs.block < end), left < (end if end < runs.num_blocks else NEVER)
            )
            for end in ends
        ]

    def _verdict(self, runs: Runs, gone: NDArray[np.bool_]) -> Verdict:
        key = (runs.cell.tobytes(), runs.log.tobytes(), gone.tobytes())
        if key not in self._judged:
            posterior = self._model.posterior(runs)
            random = np.random.default_rng([self.seed, len(runs)])
            if runs.log_cost is None:
                verdict = judge(posterior, runs, gone, self.indifference, random)
            else:
                memory = self._cost_model.posterior(runs.of_cost)
                verdict = judge_front(posterior, memory, runs, gone, self.indifference, random)
            self._judged[key] = verdict
        return self._judged[key]

    def _num_blocks(self, done: int) -> int:
        """Return the number of blocks of a round: later blocks change the picture less."""
        return max(self.at_once, done // 12)

    @property
    def _cells_beside(self) -> int:
        return max(1, self.block_size - int((self.baseline_of >= 0).any()))

    def _start(self, runs: Runs, out: NDArray[np.bool_], num_blocks: int) -> list[list[int]]:
        """Return blocks of the cells with the fewest runs, in a random order, with their baselines."""
        num_runs = np.bincount(runs.cell, minlength=len(out)).astype(float)
        place = np.random.default_rng(self.seed).permutation(len(out))
        allowed = np.flatnonzero(~out)
        found = []
        for _ in range(num_blocks):
            order = allowed[np.lexsort((place[allowed], num_runs[allowed]))]
            block: list[int] = []
            for cell in map(int, order):
                baseline = int(self.baseline_of[cell])
                new = {cell, baseline} if baseline >= 0 and not out[baseline] else {cell}
                if block and len(new | set(block)) > self.block_size:
                    break
                block += sorted(new - set(block))
            num_runs[block] += 1
            found.append(block)
        return found
