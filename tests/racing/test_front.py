"""A race for a Pareto front finds the cells of which none is better in both figures."""

import numpy as np
import pytest

from benchmarks.landscapes import Landscape, Machine
from benchmarks.racing import INDIFFERENCE, race
from vitsweep.racing.conclusions import front_of

MARGIN = float(np.log1p(INDIFFERENCE))


def test_the_front_is_fastest_first_and_every_next_cell_is_leaner_by_more_than_the_indifference() -> (
    None
):
    fast = np.array([0.5, 0.4, 0.3, 0.2, 0.6])
    lean = np.array([0.0, 0.01, 0.2, 0.1, 9.0])
    allowed = np.array([True, True, True, True, False])
    assert front_of(fast, lean, allowed, MARGIN) == [0, 2]


def test_of_equally_fast_cells_the_leaner_is_on_the_front() -> None:
    fast, lean = np.zeros(3), np.array([0.0, 0.4, 0.2])
    assert front_of(fast, lean, np.ones(3, bool), MARGIN) == [1]


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.full) for s in (1, 2))])
def test_a_race_finds_a_front_that_covers_every_cell(seed: int) -> None:
    random = np.random.default_rng(seed)
    land = Landscape.drawn(96, kind="smooth", random=random).with_cost(random)
    found = race(Machine(land, 0.03, random), seed, cap=5 * 96)
    assert land.front_loss(found.front) <= 2 * MARGIN
    assert found.settled
    assert found.runs < 5 * 96
    assert not found.dropped[list(found.front)].any()
