"""What a race concludes from a posterior: who leads, who is dropped, who is run next, whether it is over.

Dropping and stopping follow one rule each (Kalyanakrishnan et al. 2012 for the indifference; the
posterior takes the place of their confidence bounds):

- a cell is dropped when it is shown worse than the leader at all, and judged anew after each round.
  Dropping already within the indifference would let small losses add up while leaders change;
- the race is settled when the probability that any live cell beats the leader by more than the
  indifference is at most `LEVEL` in two consecutive rounds (see `Race`), and no cell is left that
  was ahead of the leader in its own few runs: the model takes these for noise, which further runs test.

Challengers are drawn by top-two Thompson sampling (Russo 2016): the best cell of a joint draw,
without the leader; draws in which it beats the leader by more than the indifference come first.

A race begins with some blocks that cover the cells at random, each once. Then, round after round, the
model is fitted to all runs, and the rules above say who runs next. Nothing is kept between rounds: an
interrupted race continues from its stored runs as if it had not been interrupted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import islice
from math import ceil

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from vitsweep.racing.model import Design, Floats, Ints, Mixture, Model, Runs, Scales

LEVEL = 0.05
"""Probability of an end with a leader that is not within the indifference, by the model."""
NUM_DRAWS = 300
ODD_WEIGHT = 0.5
LEAST_RUNS_OF_LEADER = 4
LEAST_RUNS_AHEAD = 5
"""A cell that may be ahead of the leader by its own mean has so many runs before the race is settled."""
MARGIN_AHEAD = 0.5
"""By so much of the noise of a run the mean of such a cell may be below the leader's."""
DRAWS_PER_RUN = 1.5
"""A block with room for six challengers takes those of the next nine draws: the fewer rivals are left,
the shorter it is."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """What the runs so far say.

    Attributes:
        leader: cell with the highest mean among those that ran and are still in the race.
        runner_up: the second of them; the leader itself where there is no other.
        chance_of_better: probability that some live cell beats the leader by more than the indifference.
        num_blocks: that were run.
        scales: of the fitted model.
        odd_runs: of each run, whether it was far off what the model expects (weight below a half).
        gain: of each cell over the leader, log throughput; its mean.
        gain_sd: standard deviation of `gain`.
        alive: cells that are neither shown worse nor out for another reason.
        num_runs: of each cell.
        is_settled: by these runs alone; a race asks for it in two consecutive rounds.
        challengers: cells by how soon they are run next.
        front: of a race for two figures, the cells of the front, fastest first; else empty.
        memory_saving: of a race for two figures, `gain` of the second, larger is better; else None.
    """

    leader: int
    runner_up: int
    chance_of_better: float
    num_blocks: int
    scales: Scales
    odd_runs: NDArray[np.bool_]
    gain: Floats
    gain_sd: Floats
    alive: NDArray[np.bool_]
    num_runs: Ints
    is_settled: bool
    challengers: tuple[int, ...]
    front: tuple[int, ...] = ()
    memory_saving: Floats | None = None


def judge(
    posterior: Mixture,
    runs: Runs,
    out: NDArray[np.bool_],
    indifference: float,
    random: np.random.Generator,
) -> Verdict:
    """Return what a posterior says.

    Args:
        posterior: after `runs`.
        runs: that were measured.
        out: cells that left the race before.
        indifference: gains below it do not matter: 0.02 is 2 %.
        random: for the draws.
    """
    num_cells, mean = len(out), posterior.mean
    num_runs = np.bincount(runs.cell, minlength=num_cells)
    standing = np.where((num_runs > 0) & ~out, mean, -np.inf)
    leader = int(standing.argmax())
    draws_at = posterior.draws(NUM_DRAWS, random)
    of_leader = draws_at(np.array([leader]))
    gain_sd, alive = np.zeros(num_cells), ~out
    best, best_cell = np.full(NUM_DRAWS, -np.inf), np.full(NUM_DRAWS, leader)
    limit = -ndtri(LEVEL / 2 / max(num_cells, 1))  # union bound over the cells
    for cells in posterior.chunks():
        gain = draws_at(cells) - of_leader
        gain_sd[cells] = gain.std(axis=1)
        shown_worse = mean[leader] - mean[cells] > limit * np.maximum(gain_sd[cells], 1e-9)
        alive[cells] &= ~shown_worse
        rivals = alive[cells] & (cells != leader)
        gain[~rivals] = -np.inf
        winner = gain.argmax(axis=0)
        top = gain[winner, np.arange(NUM_DRAWS)]
        is_better = top > best
        best = np.where(is_better, top, best)
        best_cell = np.where(is_better, cells[winner], best_cell)
    alive[leader] = not out[leader]
    standing[leader] = -np.inf
    runner_up = int(standing.argmax()) if np.isfinite(standing).any() else leader
    threshold = np.log1p(indifference)
    chance = float((best > threshold).mean())
    ahead = [c for c in _ahead(posterior, runs, leader) if not out[c]]
    enough = num_runs[leader] >= LEAST_RUNS_OF_LEADER and not ahead
    order = np.lexsort((random.random(NUM_DRAWS), best <= threshold))
    found = best_cell[order][np.isfinite(best[order])]
    if not found.size:
        # all rivals were dropped at once: the nearest run again before the race ends
        rivals = np.flatnonzero(~out & (np.arange(num_cells) != leader))
        found = rivals[np.argsort(-mean[rivals], kind="stable")]
    return Verdict(
        leader=leader,
        runner_up=runner_up,
        chance_of_better=chance,
        num_blocks=runs.num_blocks,
        scales=posterior.scales,
        odd_runs=posterior.weights < ODD_WEIGHT,
        gain=mean - mean[leader],
        gain_sd=gain_sd,
        alive=alive,
        num_runs=num_runs,
        is_settled=bool(chance <= LEVEL and enough),
        challengers=(*ahead, *(int(c) for c in found)),
    )


def _ahead(posterior: Mixture, runs: Runs, leader: int) -> list[int]:
    """Return cells with too few runs that may be ahead of the leader, by their own runs without the model.

    A run counts as its difference from the level of its block, which is what the other runs of the block
    have beyond the model's means of their cells. Cells of which every run is an outlier are among them.
    """
    beyond = runs.log - posterior.mean[runs.cell]
    is_first, blocks = runs.first > 0, runs.block
    cold = np.median(beyond[is_first]) - np.median(beyond[~is_first]) if is_first.any() else 0.0
    beyond = beyond - cold * runs.first
    sums, sizes = np.bincount(blocks, beyond), np.bincount(blocks)
    of_run = beyond - (sums[blocks] - beyond) / np.maximum(sizes[blocks] - 1, 1)
    num_cells, is_odd = len(posterior.mean), posterior.weights < ODD_WEIGHT
    num_runs = np.bincount(runs.cell, minlength=num_cells)
    own = posterior.mean + np.bincount(runs.cell, of_run, num_cells) / np.maximum(num_runs, 1)
    is_unknown = np.bincount(runs.cell, is_odd, num_cells) == num_runs
    few = (num_runs > 0) & (num_runs < LEAST_RUNS_AHEAD)
    few &= (own > posterior.mean[leader] - MARGIN_AHEAD * posterior.scales.noise) | is_unknown
    few[leader] = False
    return [int(c) for c in np.argsort(-own, kind="stable") if few[c]]


def proposals(verdict: Verdict, always: Ints, size: int, num_blocks: int) -> list[list[int]]:
    """Return the cells of the next blocks: those that are always in one, then challengers.

    Args:
        verdict: after all runs so far.
        always: the leader, and the baseline where there is one.
        size: runs of a block at most.
        num_blocks: wanted; fewer where there are no challengers left.
    """
    found: list[list[int]] = []
    wanted = iter(verdict.challengers)
    for _ in range(num_blocks):
        block = list(dict.fromkeys(int(cell) for cell in always))
        num_always = len(block)
        room = max(size - num_always, 1)
        for cell in islice(wanted, ceil(DRAWS_PER_RUN * room)):
            if cell not in block:
                block.append(cell)
            if len(block) == num_always + room:
                break
        if len(block) == num_always and found:
            break
        found.append(block)
    return found


# What a race for two figures concludes: the Pareto front of throughput and, say, peak memory.
#
# Each figure has a posterior of its own. A cell *covers* another where it is at most the indifference
# worse in both figures. The front is a set of measured cells of which every next one is slower, by its
# mean, and uses less memory by more than the indifference.
#
# - A cell is dropped when some cell of the front is shown faster at all and shown to cost no more than
# the indifference above it. Cells are judged anew after each round, and always against the front
# itself, so that small losses do not add up while the front changes.
# - The race is settled when, with probability 1 - `LEVEL` at least, the front covers every live cell and
# no live cell is better than one of the front by more than the indifference in both figures. This is
# the aim of epsilon-PAL (Zuluaga, Krause and Pueschel 2016, Journal of Machine Learning Research 17),
# with joint draws in the place of its rectangles of confidence.
#
# Challengers are those cells that a draw puts furthest outside the front, each with the cell of the front
# that it is to be compared with (Thompson sampling, as in `judge`).


def judge_front(
    throughput: Mixture,
    memory: Mixture,
    runs: Runs,
    out: NDArray[np.bool_],
    indifference: float,
    random: np.random.Generator,
) -> Verdict:
    """Return what the posteriors of two figures say, larger being better in both.

    Args:
        throughput: posterior of log throughput, after `runs`.
        memory: posterior of minus the log of peak memory, after `runs.of_cost`.
        runs: that were measured.
        out: cells that left the race before.
        indifference: differences below it do not matter: 0.02 is 2 %.
        random: for the draws.
    """
    num_cells, margin = len(out), float(np.log1p(indifference))
    num_runs = np.bincount(runs.cell, minlength=num_cells)
    ran = (num_runs > 0) & ~out
    front = front_of(throughput.mean, memory.mean, ran if ran.any() else ~out, margin)
    leader = front[0]
    draws = [posterior.draws(NUM_DRAWS, random) for posterior in (throughput, memory)]
    of_front = [np.stack([at(np.array([f]))[0] for f in front]) for at in draws]
    gain_sd, alive = np.zeros(num_cells), ~out
    furthest, cell_of = np.full(NUM_DRAWS, -np.inf), np.full(NUM_DRAWS, leader)
    partner_of = np.full(NUM_DRAWS, leader)
    # union bound over the pairs of a cell and one of the front, and over the two figures
    limit = -ndtri(LEVEL / 4 / (num_cells * len(front)))
    for cells in throughput.chunks():
        at_cells = [at(cells) for at in draws]
        uncovered, nearest = np.full(at_cells[0].shape, np.inf), np.zeros(at_cells[0].shape, int)
        better = np.full(at_cells[0].shape, -np.inf)
        worst = np.zeros(at_cells[0].shape, int)
        for place, member in enumerate(front):
            faster, less_memory = (c - f[place] for c, f in zip(at_cells, of_front, strict=True))
            if place == 0:
                gain_sd[cells] = faster.std(axis=1)
            is_slower = _shown(throughput.mean[member] - throughput.mean[cells], faster, limit)
            needs_no_less = _shown(
                memory.mean[member] - memory.mean[cells] + margin, less_memory, limit
            )
            alive[cells] &= ~(is_slower & needs_no_less)
            either, both = np.maximum(faster, less_memory), np.minimum(faster, less_memory)
            nearest, uncovered = _where(either < uncovered, place, either, nearest, uncovered)
            worst, better = _where(both > better, place, both, worst, better)
        outside = np.maximum(uncovered, better)
        partner = np.where(uncovered >= better, nearest, worst)
        outside[~alive[cells]] = -np.inf
        winner, every = outside.argmax(axis=0), np.arange(NUM_DRAWS)
        is_further = outside[winner, every] > furthest
        furthest = np.where(is_further, outside[winner, every], furthest)
        cell_of = np.where(is_further, cells[winner], cell_of)
        partner_of = np.where(is_further, np.array(front)[partner[winner, every]], partner_of)
    chance = float((furthest > margin).mean())
    rare = [f for f in front if num_runs[f] < LEAST_RUNS_OF_LEADER]
    order = np.lexsort((random.random(NUM_DRAWS), furthest <= margin))
    pairs = [int(c) for draw in order for c in (cell_of[draw], partner_of[draw])]
    return Verdict(
        leader=leader,
        runner_up=front[1] if len(front) > 1 else leader,
        chance_of_better=chance,
        num_blocks=runs.num_blocks,
        scales=throughput.scales,
        odd_runs=throughput.weights < ODD_WEIGHT,
        gain=throughput.mean - throughput.mean[leader],
        gain_sd=gain_sd,
        alive=alive,
        num_runs=num_runs,
        is_settled=bool(chance <= LEVEL and not rare),
        challengers=(*rare, *pairs),
        front=tuple(front),
        memory_saving=memory.mean - memory.mean[leader],
    )


def front_of(
    throughput: Floats, saving: Floats, allowed: NDArray[np.bool_], margin: float
) -> list[int]:
    """Return the cells of the front, fastest first: each saves more than `margin` beside those before.

    Args:
        throughput: log throughput of each cell.
        saving: of each cell, minus the log of what should be small, such as peak memory.
        allowed: cells that may be on the front, one at least.
        margin: log of 1 + indifference.
    """
    order = np.lexsort((-saving, -throughput))
    front: list[int] = []
    for cell in map(int, order[allowed[order]]):
        if not front or saving[cell] > saving[front[-1]] + margin:
            front.append(cell)
    return front


def _shown(difference: Floats, draws: Floats, limit: float) -> NDArray[np.bool_]:
    """Tell of which cells a difference is shown to be above 0, its draws being those of its negative."""
    return difference > limit * np.maximum(draws.std(axis=1), 1e-9)


def _where(
    better: NDArray[np.bool_],
    place: int,
    value: Floats,
    places: NDArray[np.int64],
    values: Floats,
) -> tuple[NDArray[np.int64], Floats]:
    return np.where(better, place, places), np.where(better, value, values)


# The race as a pure function: all runs so far in, the next blocks or the reason to stop out.

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
