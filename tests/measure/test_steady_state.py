"""Warm-up is cut where the samples show it; what still moves afterwards is called drift."""

import numpy as np
import pytest

from vitsweep.measure.window import is_drifting, warm_up_steps

SEEDS = range(100)


def steps(seed: int, count: int, noise: float = 0.02) -> np.ndarray:
    return 100 * np.exp(np.random.default_rng(seed).normal(0, noise, count))


def test_the_steps_that_were_asked_for_are_always_left_out() -> None:
    for count, at_least in ((25, 5), (120, 20), (6, 2), (4, 0)):
        for seed in SEEDS:
            assert warm_up_steps(list(steps(seed, count)), at_least) >= at_least


def test_no_more_than_half_of_a_run_is_ever_cut() -> None:
    for seed in SEEDS:
        falling = steps(seed, 40) * np.linspace(5, 1, 40)
        assert warm_up_steps(list(falling), 5) <= 20


def test_equal_steps_lose_nothing() -> None:
    assert warm_up_steps([10.0] * 30, 5) == 5


def test_noise_alone_costs_few_steps() -> None:
    cuts = [warm_up_steps(list(steps(seed, 25)), 5) for seed in SEEDS]
    assert np.median(cuts) == 5
    assert np.mean(cuts) < 7


@pytest.mark.parametrize("time_constant", [2, 3, 5])
def test_a_slow_start_is_cut_away(time_constant: float) -> None:
    for seed in SEEDS:
        excess = 3 * np.exp(-np.arange(60) / time_constant)
        cut = warm_up_steps(list(steps(seed, 60) * (1 + excess)), 2)
        assert excess[cut] < 0.08, "what is left is hardly more than noise"
        assert excess[:cut].mean() > 0.1, "what is cut was warm-up"


def test_a_stall_in_the_first_half_is_no_warm_up() -> None:
    """Else throughput would not see half of all stalls."""
    times = [100.0] * 30
    times[9] = 900.0
    assert warm_up_steps(times, 5) == 5
    every_fifth = [300.0 if step % 5 == 4 else 80.0 for step in range(30)]
    assert warm_up_steps(every_fifth, 3) == 3


def test_slow_steps_right_after_the_warm_up_are_cut() -> None:
    times = [900.0, 100.0, 400.0, 300.0, *[100.0, 101.0] * 12]
    assert warm_up_steps(times, 2) == 4


@pytest.mark.parametrize(("count", "at_least"), [(1, 0), (1, 5), (2, 1), (3, 5), (0, 0), (2, 0)])
def test_runs_too_short_to_judge_keep_a_step_where_there_is_one(count: int, at_least: int) -> None:
    cut = warm_up_steps([1.0] * count, at_least)
    assert 0 <= cut <= max(0, count - 1)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_trend_is_found(sign: int) -> None:
    trend = 1 + sign * np.linspace(0, 0.2, 20)
    assert all(is_drifting(list(steps(seed, 20) * trend)) for seed in SEEDS)


def test_noise_without_a_trend_is_no_drift() -> None:
    found = [is_drifting(list(steps(seed, 20))) for seed in SEEDS]
    assert np.mean(found) <= 0.05


def test_a_sure_but_small_trend_is_no_drift() -> None:
    assert not is_drifting(list(np.linspace(100, 102, 50)))
    assert is_drifting(list(np.linspace(100, 108, 50)))


def test_one_slow_step_is_no_drift() -> None:
    times = [100.0] * 20
    times[-1] = 1000.0
    assert not is_drifting(times)


def test_fewer_than_eight_steps_show_no_drift() -> None:
    assert not is_drifting([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert is_drifting([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
