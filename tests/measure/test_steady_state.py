"""What still moves within the timed window is called drift."""

import numpy as np
import pytest
from scipy import stats

from vitsweep.measure.summarize import is_drifting, theil_sen

SEEDS = range(100)


def steps(seed: int, count: int, noise: float = 0.02) -> np.ndarray:
    return 100 * np.exp(np.random.default_rng(seed).normal(0, noise, count))


def test_slope_and_interval_are_scipys() -> None:
    for seed in range(20):
        times = steps(seed, 8 + 3 * seed).round(seed % 4)  # rounded ones are equal here and there
        wanted = stats.theilslopes(times)
        found = theil_sen(times)
        assert found == pytest.approx(
            (wanted.slope, wanted.low_slope, wanted.high_slope), rel=1e-12
        )


@pytest.mark.parametrize("sign", [1, -1])
def test_a_trend_is_found(sign: int) -> None:
    trend = 1 + sign * np.linspace(0, 0.2, 20)
    assert all(is_drifting(list(steps(seed, 20) * trend)) for seed in SEEDS)


def test_noise_without_a_trend_is_no_drift() -> None:
    found = [is_drifting(list(steps(seed, 20))) for seed in SEEDS]
    assert np.mean(found) <= 0.05


def test_a_sure_but_small_trend_is_no_drift() -> None:
    assert not is_drifting(list(np.linspace(100, 102, 50)))
    assert is_drifting(list(np.linspace(100, 104, 50)))


def test_a_trend_counts_from_three_hundredths_of_the_median_on() -> None:
    """Steps of 0.1 ms over ten steps move the step time by 1 ms."""
    for start, drifts in ((33.0, False), (32.5, True)):
        assert is_drifting([start + 0.1 * step for step in range(10)]) is drifts


def test_one_slow_step_is_no_drift() -> None:
    times = [100.0] * 20
    times[-1] = 1000.0
    assert not is_drifting(times)


def test_fewer_than_eight_steps_show_no_drift() -> None:
    assert not is_drifting([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert is_drifting([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
