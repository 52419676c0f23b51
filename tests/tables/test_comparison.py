import math

import numpy as np
import pytest
from scipy import stats

from vitsweep.errors import VitsweepError
from vitsweep.tables.comparison import PILOT, blocks_wanted, compared


def test_up_to_the_pilot_it_is_students_interval():
    logs = [0.10, 0.14, 0.12, 0.13]
    low, high = stats.t.interval(0.95, 3, np.mean(logs), stats.sem(logs))
    result = compared(logs)
    assert (result.low, result.high) == pytest.approx((math.exp(low), math.exp(high)))
    assert result.claim == "faster"


def test_the_pilot_decides_how_many_blocks_are_wanted():
    assert blocks_wanted([0.1], 0.02) == PILOT
    quiet = [0.1, 0.101, 0.099, 0.1, 0.1, 0.1]
    assert blocks_wanted(quiet, 0.02) == PILOT
    noisy = [0.0, 0.1, -0.1, 0.05, -0.05, 0.0]
    wanted = blocks_wanted(noisy, 0.02)
    assert wanted > 50
    # what comes after the pilot does not change the plan
    assert blocks_wanted([*noisy, 9.0, -9.0], 0.02) == wanted


def test_with_as_many_blocks_as_wanted_the_interval_is_narrow_enough():
    generator = np.random.default_rng(5)
    logs = list(generator.normal(0.2, 0.05, PILOT))
    logs += list(generator.normal(0.2, 0.05, blocks_wanted(logs, 0.03) - PILOT))
    result = compared(logs)
    assert result.high / result.ratio <= 1.03 + 1e-9


@pytest.mark.parametrize("half_width", [0.01, 0.02, 0.03, 0.06])
def test_the_interval_keeps_its_coverage_with_the_stopping_rule(half_width):
    generator, spread, budget = np.random.default_rng(3), 0.03, 40
    logs = generator.normal(math.log(1.2), spread, (3000, budget))
    covered = 0
    for row in logs:
        result = compared(row[: min(blocks_wanted(row, half_width), budget)])
        covered += result.low <= 1.2 <= result.high
    assert covered / len(logs) == pytest.approx(0.95, abs=0.012)  # three standard errors


def test_equal_settings_are_called_different_5_percent_of_the_time():
    generator = np.random.default_rng(4)
    claims = [
        compared(row[: min(blocks_wanted(row, 0.02), 40)]).claim
        for row in generator.normal(0, 0.03, (3000, 40))
    ]
    assert np.mean([claim in ("faster", "slower") for claim in claims]) <= 0.05 + 0.012


def test_two_blocks_claim_nothing_and_none_says_nothing():
    assert compared([0.5, 0.5]).claim == "too few blocks"
    assert math.isnan(compared([]).ratio)


def test_the_result_is_a_sentence():
    text = compared([math.log(1.5)] * 3).sentence("O1", "fp32")
    assert text == "O1 has 1.50x [1.500, 1.500] the throughput of fp32 over 3 blocks: faster."


def test_a_width_of_zero_is_refused():
    with pytest.raises(VitsweepError, match=r"above 0; got 0"):
        blocks_wanted([0.1] * 9, 0)
