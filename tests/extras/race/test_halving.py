"""Successive halving over simulated runs: who is dropped when, and which cell may still be the fastest."""

import numpy as np

from vitsweep.extras.race.halving import LAST, Runs, Standing, fit, standing, within_reach

TRUTH = np.r_[0.0, np.linspace(-0.3, 0.3, 24)]
"""Log throughput of the cells; 0 is the reference."""


class Machine:
    """Measures blocks whose level drifts."""

    def __init__(self, noise: float, seed: int = 0) -> None:
        self.random, self.noise = np.random.default_rng(seed), noise
        self.runs = Runs(np.zeros(0, np.int64), np.zeros(0, str), np.zeros(0))

    def block(self, *cells: int, reference: int | None = 0) -> None:
        order = [*([] if reference is None else [reference]), *cells]
        level, number = self.random.normal(0, 0.5), len(set(self.runs.block))
        logs = TRUTH[order] + level + self.random.normal(0, self.noise, len(order))
        self.runs = Runs(
            np.r_[self.runs.cell, order].astype(np.int64),
            np.r_[self.runs.block, [f"b{number}"] * len(order)],
            np.r_[self.runs.log, logs],
        )


def halved(machine: Machine, out: np.ndarray | None = None) -> Standing:
    out = np.zeros(len(TRUTH), bool) if out is None else out
    while (at := standing(machine.runs, out, [0])).lacking:
        for some in np.array_split(at.lacking, -(-len(at.lacking) // 7)):
            machine.block(*some.tolist())
    return at


def test_the_slower_half_is_dropped_after_each_round_down_to_three() -> None:
    machine = Machine(0.001)
    at = halved(machine)
    assert at.best == [24, 23, 22, 0], "the reference stays"
    runs = np.bincount(machine.runs.cell)[1:]
    assert dict(zip(*np.unique(runs, return_counts=True), strict=True)) == {
        1: 12,
        2: 6,
        3: 3,
        4: LAST,
    }
    assert sorted(set(at.dropped.values())) == [4, 6, 7]
    assert {c for c, after in at.dropped.items() if after == 4} == set(range(1, 13))
    np.testing.assert_allclose(at.mean[1:], TRUTH[1:], atol=0.005)


def test_a_race_that_knows_only_its_runs_goes_on_as_it_began() -> None:
    machine = Machine(0.02)
    end = halved(machine)
    for cut in range(1, len(machine.runs.log)):
        before = standing(machine.runs.part(slice(cut)), np.zeros(len(TRUTH), bool), [0])
        assert before.dropped.items() <= end.dropped.items()


def test_runs_of_a_block_without_the_reference_say_nothing_of_the_others() -> None:
    machine = Machine(0.001)
    machine.block(1, 2, 3, reference=None)  # killed before the reference ran
    at = standing(machine.runs, np.zeros(len(TRUTH), bool), [0])
    assert (len(at.runs.log), len(at.lacking), at.best) == (0, 24, [])
    assert halved(machine).best == [24, 23, 22, 0]


def test_a_cell_that_is_out_takes_part_as_far_as_it_has_runs() -> None:
    machine, out = Machine(0.001), np.zeros(len(TRUTH), bool)
    out[24] = True  # never ran
    at = halved(machine, out)
    assert at.best == [23, 22, 21, 0]
    out[0] = True  # the reference fails: the next cell takes its place
    machine.block(22, 21, reference=1)
    at = standing(machine.runs, out, [0, 1])
    assert at.best == [23, 22, 21, 1]


def test_least_squares_takes_the_blocks_out_and_names_the_noise() -> None:
    machine = Machine(0.05, seed=3)
    for _ in range(40):
        machine.block(1, 12, 24)
    mean, noise, degrees = fit(machine.runs, len(TRUTH))
    np.testing.assert_allclose((mean - mean[0])[[1, 12, 24]], TRUTH[[1, 12, 24]], atol=0.03)
    assert degrees == 160 - 4 - 40 + 1
    assert abs(noise - 0.05) < 0.01
    assert np.isneginf(mean[2])


def test_a_dropped_cell_is_within_reach_by_the_noise_of_its_runs() -> None:
    others = [c for c in range(len(TRUTH)) if c not in (24, 23)]
    reached = []
    for noise in (0.001, 0.1):
        machine = Machine(noise)
        at = halved(machine)
        before = len(machine.runs.log)
        for _ in range(5):
            machine.block(24, 23)
        fresh = machine.runs.part(slice(before, None))
        reached.append(within_reach(at, 24, others, fresh, 0, float(np.log(1.02))))
    assert reached[0] == []
    assert len(reached[1]) > 5
