"""Intervals hold the truth 95 times of 100 in the order that the planner really gives to blocks.

Under normal, heavy-tailed, cold-first-run and drifting noise at 3, 5 and 10 blocks; where the design
cannot hold it (correlated blocks), the share that it does hold is stated.
"""

import numpy as np
import pytest
from pandas.testing import assert_frame_equal
from scipy.special import stdtrit

from tests.noise import (
    as_listed,
    autocorrelated,
    cold_first_run,
    coverage,
    drifting,
    heavy_tailed,
    normal,
    run_to_run,
    simulate,
)
from vitsweep.planning.blocks import BalancedOrder
from vitsweep.tables.blocks import log_ratios, log_throughput_per_block
from vitsweep.tables.cells import cells
from vitsweep.tables.stats import estimate, half_width, mean_interval
from vitsweep.tables.valid_runs import valid_runs

CELLS = {"base": 1.0, "fast": 1.3, "slow": 0.9, "same": 1.0}
SWEEPS = 250

HELD = {
    "normal": normal(),
    "heavy_tailed": heavy_tailed(),
    "cold_first_run_of_the_sweep": cold_first_run(every_block=False),
    "cold_first_run_of_every_block": cold_first_run(),
    "drift_over_the_sweep": drifting(),
    "drift_within_blocks": drifting(over="block"),
}


def planned(generator, shape):
    """Positions as `planning.blocks` gives them, a new order for each sweep."""
    sweeps, num_blocks, num_cells = shape
    positions = np.zeros(shape, dtype=np.int64)
    for sweep in range(sweeps):
        order = BalancedOrder(seed=int(generator.integers(2**31)))
        for block in range(num_blocks):
            names = order.next_block([str(cell) for cell in range(num_cells)])
            positions[sweep, block] = np.argsort([int(name) for name in names])
    return positions


def covered(noise, num_blocks, sweeps=SWEEPS, order=planned):
    generator = np.random.default_rng(11)
    runs, baselines = simulate(
        CELLS, noise, generator, num_blocks=num_blocks, sweeps=sweeps, order=order
    )
    found = estimate(log_ratios(log_throughput_per_block(runs), baselines))
    cell = found["cell_id"].str.split("/").str[1]
    shares = [coverage(found[cell == name], CELLS[name]) for name in CELLS if name != "base"]
    assert len(found) == sweeps * (len(CELLS) - 1)
    return float(np.mean(shares))


def test_the_interval_of_a_speedup_holds_the_truth():
    for num_blocks in [3, 5, 10]:
        for name in HELD:
            share = covered(HELD[name], num_blocks)
            # more than 95 % is allowed: balanced positions cancel what the interval still pays for
            assert share >= 0.93


CONSERVATIVE = ("cold_first_run_of_every_block", "drift_within_blocks")
"""Balanced positions cancel these in the mean; the interval still pays for them and is too wide."""


@pytest.mark.full
@pytest.mark.parametrize("num_blocks", [3, 5, 10])
@pytest.mark.parametrize("name", HELD)
def test_over_4000_sweeps_it_holds_the_truth_in_95_percent_within_2(name, num_blocks):
    share = covered(HELD[name], num_blocks, sweeps=4_000)
    assert 0.93 <= share <= (1.0 if name in CONSERVATIVE else 0.97)


@pytest.mark.parametrize("num_blocks", [3, 5])
def test_balanced_orders_take_out_what_a_cold_first_run_costs(num_blocks):
    """The first run of every block is 6 % slower: of no cell more than of its baseline, in the mean."""
    generator = np.random.default_rng(num_blocks)
    runs, baselines = simulate(
        CELLS, cold_first_run(), generator, num_blocks=num_blocks, sweeps=SWEEPS, order=planned
    )
    found = estimate(log_ratios(log_throughput_per_block(runs), baselines))
    truth = found["cell_id"].str.split("/").str[1].map(CELLS)
    bias = np.log(found["speedup"] / truth).mean()
    assert abs(bias) < 0.005
    fixed, _ = simulate(
        CELLS, cold_first_run(), generator, num_blocks=num_blocks, sweeps=SWEEPS, order=as_listed
    )
    found = estimate(log_ratios(log_throughput_per_block(fixed), baselines))
    assert np.log(found["speedup"] / truth).mean() > 0.05, "the baseline always first"


@pytest.mark.parametrize("num_blocks", [5, 10])
def test_blocks_that_resemble_each_other_cost_coverage_as_the_page_says(num_blocks):
    # benchmarks/results/simulations.md
    assert covered(autocorrelated(correlation=0.3), num_blocks) == pytest.approx(0.87, abs=0.035)


def test_from_12_blocks_on_the_interval_allows_for_blocks_that_resemble_each_other():
    assert covered(autocorrelated(correlation=0.3), 12) >= 0.92


def changes_covered(sides) -> float:
    """The share of 95 % intervals of now / kept, of cells that are equal on both sides, that hold 1."""
    diff = pytest.importorskip("vitsweep.extras.gate.diff")
    found = diff.welch(*(diff._moments(valid_runs(r), "speedup", b) for r, b in sides))
    known = found.dropna()
    assert len(known) == SWEEPS * (len(CELLS) - 1)
    return float((known["middle"].abs() <= half_width(known["error"], known["degrees"])).mean())


def test_so_does_the_interval_of_a_change_and_that_of_a_mean():
    noise, kinds = autocorrelated(correlation=0.3), {"sweeps": SWEEPS, "num_blocks": 14}
    sides = [simulate(CELLS, noise, np.random.default_rng(seed), **kinds) for seed in (1, 2)]
    assert changes_covered(sides) >= 0.92
    blocks = noise(np.random.default_rng(3), np.zeros((1000, 14, 1), int))[..., 0]
    ends = np.array([mean_interval(values) for values in blocks])
    assert ((ends[:, 1] <= 0) & (ends[:, 2] >= 0)).mean() >= 0.92


def test_blocks_are_taken_in_the_order_of_time_though_files_of_runs_have_random_names():
    sides = [
        simulate(CELLS, autocorrelated(correlation=0.6), np.random.default_rng(seed), num_blocks=14)
        for seed in (1, 2)
    ]
    gate = pytest.importorskip("vitsweep.extras.gate.gate")
    found = [
        (
            cells(runs, baselines).set_index("cell_id").sort_index(),
            gate.gate(runs, sides[1][0], baselines=baselines)
            .rows.set_index("cell_id")
            .sort_index(),
        )
        for runs, baselines in (sides[0], (sides[0][0].sample(frac=1, random_state=0), sides[0][1]))
    ]
    for in_time, shuffled in zip(*found, strict=True):
        assert_frame_equal(in_time, shuffled)
    halves = np.log(found[0][0]["speedup_high"] / found[0][0]["speedup"])
    plain = found[0][0]["block_noise"] / 14**0.5 * stdtrit(13, 0.975)
    assert (halves / plain).max() > 1.5


def test_runs_that_resemble_the_run_before_cost_little_coverage():
    # AR(1) 0.6 from run to run, across the ends of blocks: the ratios of a block share most of it
    assert covered(run_to_run(correlation=0.6), 10) >= 0.90


@pytest.mark.parametrize("name", ["normal", "heavy_tailed", "cold_first_run_of_every_block"])
def test_the_interval_of_a_change_between_two_days_holds_the_truth(name):
    sides = [
        simulate(CELLS, HELD[name], np.random.default_rng(seed), sweeps=SWEEPS, order=planned)
        for seed in (1, 2)
    ]
    assert changes_covered(sides) >= 0.93
