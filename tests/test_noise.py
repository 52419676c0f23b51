"""The simulated sweeps are what they say: spread, tails, position effects, correlations, truth."""

import numpy as np
import pytest
from scipy import stats

from tests.builders import run
from tests.noise import (
    NOISES,
    as_listed,
    autocorrelated,
    cold_first_run,
    coverage,
    drifting,
    heavy_tailed,
    normal,
    rotated,
    run_to_run,
    shuffled,
    simulate,
    slow_tailed,
)
from vitsweep.tables.speedup import speedup_over

SHAPE = (4000, 6, 4)


def logs(noise, order=shuffled):
    generator = np.random.default_rng(3)
    positions = order(generator, SHAPE)
    return noise(generator, positions), positions


@pytest.mark.parametrize("noise", [normal(0.03), heavy_tailed(0.03), autocorrelated(0.03)])
def test_noise_has_the_stated_spread_and_no_mean(noise):
    found, _ = logs(noise)
    assert found.mean() == pytest.approx(0.0, abs=0.0005)
    assert found.std() == pytest.approx(0.03, rel=0.05)


def test_heavy_tails_hold_more_far_runs_than_normal_ones():
    far = {name: float((np.abs(logs(NOISES[name])[0]) > 0.12).mean()) for name in NOISES}
    assert far["normal"] < 0.0002
    expected = 2 * stats.t.sf(0.12 / 0.03 * np.sqrt(3), 3)
    assert far["heavy_tailed"] == pytest.approx(expected, rel=0.15)


def test_slow_runs_are_only_ever_slower():
    found, _ = logs(slow_tailed(spread=0.0, share=0.1, slowdown=0.15))
    assert set(np.round(np.unique(found), 6)) == {round(float(np.log(0.85)), 6), 0.0}
    assert (found < 0).mean() == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("every_block", [True, False])
def test_the_first_run_of_a_block_or_of_the_sweep_is_cold(every_block):
    found, positions = logs(cold_first_run(spread=0.0, slowdown=0.06, every_block=every_block))
    cold = positions == 0
    cold[:, 1:] &= every_block
    assert found[cold] == pytest.approx(np.log(0.94))
    assert not found[~cold].any()


def test_drift_goes_on_from_block_to_block_or_starts_again_in_each():
    through, positions = logs(drifting(spread=0.0, slowdown=0.1), as_listed)
    assert (through[0, 0, 0], through[0, -1, -1]) == (0.0, pytest.approx(np.log(0.9)))
    assert (np.diff(through.reshape(SHAPE[0], -1)) < 0).all()
    again, positions = logs(drifting(spread=0.0, slowdown=0.1, over="block"))
    assert again[positions == 0].max() == 0.0
    assert again[positions == 3] == pytest.approx(np.log(0.9))


def test_autocorrelation_is_between_blocks_of_a_cell_or_between_runs_in_time():
    of_cell, _ = logs(autocorrelated(correlation=0.3))
    ratios = of_cell[:, :, 1] - of_cell[:, :, 0]
    assert np.corrcoef(ratios[:, 2], ratios[:, 3])[0, 1] == pytest.approx(0.3, abs=0.05)
    assert ratios[:, 5].std() == pytest.approx(ratios[:, 0].std(), rel=0.05)
    in_time, positions = logs(run_to_run(correlation=0.6))
    ordered = np.take_along_axis(in_time, np.argsort(positions, axis=2), axis=2).reshape(
        SHAPE[0], -1
    )
    assert np.corrcoef(ordered[:, 7], ordered[:, 8])[0, 1] == pytest.approx(0.6, abs=0.04)


@pytest.mark.parametrize("order", [shuffled, rotated, as_listed])
def test_every_block_runs_every_cell_once(order):
    positions = order(np.random.default_rng(0), SHAPE)
    assert (np.sort(positions, axis=2) == np.arange(4)).all()


def test_rotated_blocks_put_every_cell_in_every_position_once():
    positions = rotated(np.random.default_rng(0), (10, 4, 4))
    assert (np.sort(positions, axis=1) == np.arange(4)[:, None]).all()
    assert len({tuple(p) for p in positions[:, 0]}) > 3


def test_without_noise_the_true_speedups_come_back_whatever_the_blocks_do():
    runs, baselines = simulate(
        {"base": 1.0, "fast": 1.3, "slow": 0.8}, normal(0.0), np.random.default_rng(1), sweeps=3
    )
    found = speedup_over(runs, baselines).set_index("cell_id")["speedup"]
    assert found[["s0/fast", "s2/slow"]].tolist() == pytest.approx([1.3, 0.8])
    assert runs["images_per_second"].std() > 5


def test_runs_have_the_columns_of_the_store_in_the_order_of_time():
    runs, baselines = simulate(
        {"base": 1.0, "fast": 1.3},
        normal(),
        np.random.default_rng(1),
        specs={"fast": {"precision": "O1", "precision.master_weights": True}},
    )
    assert set(run("a").row()) - set(runs) <= {
        "images_per_second_per_rank", "step_time_ms", "epoch_hours_imagenet1k",
        "oversubscribed", "shared_device", "throttled", "drifting", "proved",
    }  # fmt: skip
    assert baselines == {"base": "base", "fast": "base"}
    assert runs["started_at"].is_monotonic_increasing
    assert runs["run_id"].is_unique
    assert set(runs.loc[runs["cell_id"] == "fast", "precision"]) == {"O1"}
    assert set(runs.loc[runs["cell_id"] == "base", "precision"]) == {"fp32"}


def test_paired_intervals_cover_the_truth_under_normal_noise():
    runs, baselines = simulate(
        {"base": 1.0, "fast": 1.3}, normal(), np.random.default_rng(2), sweeps=2000
    )
    found = speedup_over(runs, baselines)
    assert coverage(found[found["claim"] != "baseline"], 1.3) == pytest.approx(0.95, abs=0.015)
