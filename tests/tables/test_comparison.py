import math

import numpy as np
import pytest
from scipy import stats

from tests.builders import run, table
from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables.cells import cells
from vitsweep.tables.comparison import (
    PILOT,
    blocks_wanted,
    compared,
    paired,
    with_comparisons,
)


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


HEAVY_TAILED = {
    "t": lambda g, shape: 0.02 * g.standard_t(3, shape),
    "hiccups": lambda g, shape: g.normal(0, np.where(g.random(shape) < 0.1, 0.1, 0.02)),
}


@pytest.mark.parametrize("noise", HEAVY_TAILED)
def test_it_keeps_it_where_some_blocks_are_far_off(noise):
    logs = HEAVY_TAILED[noise](np.random.default_rng(6), (2000, 40))
    results = [compared(row[: min(blocks_wanted(row, 0.03), 40)]) for row in logs]
    assert np.mean([r.low <= 1 <= r.high for r in results]) == pytest.approx(0.95, abs=0.02)


def test_equal_settings_are_called_different_5_percent_of_the_time():
    generator = np.random.default_rng(4)
    claims = [
        compared(row[: min(blocks_wanted(row, 0.02), 40)]).claim
        for row in generator.normal(0, 0.03, (3000, 40))
    ]
    assert np.mean([claim in ("faster", "slower") for claim in claims]) <= 0.05 + 0.012


def in_turns(*speeds, device="AMD EPYC 7B13", begin=0):
    """Blocks of (A, B) img/s, one per minute."""
    pairs = enumerate(speeds, begin)
    return [
        run(cell, f"b{n}", speed, minute=n, environment={"device": device})
        for n, pair in pairs
        for cell, speed in zip("AB", pair, strict=True)
    ]


def test_a_block_is_one_ratio_and_the_oldest_comes_first():
    later, earlier = in_turns((300, 100), begin=1), in_turns((200, 100), (None, 100))[:3]
    alone = run("A", "b7", 500, minute=7)
    strangers = run("C", "b1", 1, minute=1)
    runs = table(*later, *earlier, alone, strangers)
    assert paired(runs, "A", "B") == pytest.approx([math.log(2), math.log(3)])
    assert paired(runs, "B", "A") == pytest.approx([-math.log(2), -math.log(3)])


@pytest.mark.parametrize("odd", [None, math.nan, math.inf, 0.0])
def test_a_run_without_a_throughput_makes_no_pair(odd):
    runs = table(*in_turns((200, 100), (odd, 100), (200, 100)))
    assert paired(runs, "A", "B") == pytest.approx([math.log(2)] * 2)


def test_a_setting_that_was_never_measured_makes_no_pair():
    failed = run("B", "b0", status=Status.failed)
    assert paired(table(run("A", "b0"), failed), "A", "B") == []
    assert paired(table(failed), "A", "B") == []
    assert paired(table(), "A", "B") == []


def test_blocks_of_two_devices_are_refused_unless_asked_for():
    runs = table(*in_turns((200, 100)), *in_turns((400, 100), device="H200", begin=1))
    with pytest.raises(VitsweepError, match=r"different devices \(AMD EPYC 7B13, H200\)"):
        paired(runs, "A", "B")
    assert len(paired(runs, "A", "B", mixed_hardware=True)) == 2


def test_two_blocks_claim_nothing_and_none_says_nothing():
    assert compared([0.5, 0.5]).claim == "too few blocks"
    assert math.isnan(compared([]).ratio)


def test_the_result_is_a_sentence():
    text = compared([math.log(1.5)] * 3).sentence("O1", "fp32")
    assert text == "O1 has 1.50x [1.500, 1.500] the throughput of fp32 over 3 blocks: faster."


def test_a_width_of_zero_is_refused():
    with pytest.raises(VitsweepError, match=r"above 0; got 0"):
        blocks_wanted([0.1] * 9, 0)


def test_the_tables_show_the_interval_and_the_claim_that_compare_printed():
    factors = [1.02, 1.00, 1.03, 1.01, 1.02, 1.01, 1.20, 0.80, 1.30]
    runs = table(*in_turns(*((100 * f, 100) for f in factors)))
    cells_ = dict.fromkeys("AB", "B")
    variant = "A"
    command = {"command": "python -m vitsweep compare a b", "comparison": {}, "baselines": cells_}
    plain = cells(runs, cells_).set_index("cell_id").loc[variant]
    shown = with_comparisons(cells(runs, cells_), runs, [command]).set_index("cell_id").loc[variant]
    result = compared(paired(runs, variant, "B"))
    assert (shown["speedup_low"], shown["speedup_high"]) == pytest.approx((result.low, result.high))
    assert (shown["claim"], shown["speedup"]) == (result.claim, pytest.approx(result.ratio))
    assert plain["speedup_high"] > shown["speedup_high"]
    # a later sweep in the folder shows what a fixed number of blocks shows
    later = [command, {"command": "python -m vitsweep -m x=1,2", "baselines": cells_}]
    again = with_comparisons(cells(runs, cells_), runs, later).set_index("cell_id").loc[variant]
    assert again["speedup_high"] == pytest.approx(plain["speedup_high"])


def test_the_result_says_where_blocks_resemble_each_other():
    waves = [0.02, 0.02, 0.02, -0.02, -0.02, -0.02, 0.02, 0.02, 0.02, -0.02, -0.02, -0.02]
    assert "Neighbouring blocks resemble each other" in compared(waves).sentence("A", "B")
    quiet = [0.02, -0.02, 0.01, -0.01, 0.02, -0.02, 0.01]
    assert "resemble" not in compared(quiet).sentence("A", "B")
