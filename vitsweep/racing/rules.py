"""What a race concludes from a posterior: who leads, who is dropped, who is run next, whether it is over.

Dropping and stopping follow one rule each (Kalyanakrishnan et al. 2012 for the indifference; the
posterior takes the place of their confidence bounds):

- a cell is dropped when it is shown worse than the leader at all, and judged anew after each round.
  Dropping already within the indifference would let small losses add up while leaders change;
- the race is settled when the probability that any live cell beats the leader by more than the
  indifference is at most `LEVEL`, twice running (see `racing.race`).

Challengers are drawn by top-two Thompson sampling (Russo 2016): the best cell of a joint draw,
without the leader; draws in which it beats the leader by more than the indifference come first.
"""

from dataclasses import dataclass
from itertools import islice
from math import ceil

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from vitsweep.racing.design import Floats, Ints
from vitsweep.racing.model import Mixture, Runs, Scales

LEVEL = 0.05
"""Probability of an end with a leader that is not within the indifference, by the model."""
NUM_DRAWS = 300
ODD_WEIGHT = 0.5
LEAST_RUNS_OF_LEADER = 4
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
        is_settled: by these runs alone; a race asks for it twice running.
        challengers: cells by how soon they are run next.
        front: of a race for two figures, the cells of the front, fastest first; else empty.
        lean_gain: of a race for two figures, `gain` of the second, larger is better; else None.
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
    lean_gain: Floats | None = None


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
    enough = num_runs[leader] >= LEAST_RUNS_OF_LEADER
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
        challengers=tuple(int(c) for c in found),
    )


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
