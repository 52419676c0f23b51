"""A ratio that changes over the blocks is told from one that only scatters."""

import numpy as np
import pytest

from vitsweep.tables.stats import DRIFT_LEVEL, drift


def test_a_loss_of_ten_percent_over_forty_blocks_is_found_with_its_size() -> None:
    time, random = np.arange(40.0), np.random.default_rng(1)
    change, p_value = drift(time, -0.10 * time / 39 + random.normal(0, 0.03, 40))
    assert change == pytest.approx(-0.10, abs=0.04)
    assert p_value < DRIFT_LEVEL


def test_noise_alone_drifts_as_often_as_the_level_says() -> None:
    random, found = np.random.default_rng(2), 0
    for _ in range(2000):
        found += drift(np.arange(12.0), random.normal(0, 0.03, 12))[1] < DRIFT_LEVEL
    assert 8 <= found <= 36  # 20 expected; 4 standard deviations


def test_few_blocks_show_no_drift() -> None:
    change, p_value = drift(np.arange(7.0), np.arange(7.0))
    assert np.isnan(change)
    assert p_value == 1.0
