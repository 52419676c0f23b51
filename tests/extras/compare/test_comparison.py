import hashlib
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.builders import run, table
from vitsweep.errors import VitsweepError
from vitsweep.extras.compare.comparison import (
    _as_two_arms,
    blocks_wanted,
    compared,
    compared_cells,
    recorded_comparisons,
)
from vitsweep.extras.compare.measure import StopReason, _sentences
from vitsweep.results.record import SCREENING, Status
from vitsweep.tables.cells import cells
from vitsweep.tables.sentences import say


def test_the_number_of_blocks_wanted_follows_the_spread_so_far():
    assert blocks_wanted([0.1], 0.02) == 3
    assert blocks_wanted([0.1, 0.101, 0.099], 0.02) == 3
    noisy = [0.0, 0.1, -0.1, 0.05, -0.05, 0.0]
    assert 100 < blocks_wanted(noisy, 0.02) < blocks_wanted(noisy, 0.01)


def test_with_as_many_blocks_as_wanted_the_interval_is_narrow_enough():
    logs = list(np.random.default_rng(5).normal(0.2, 0.05, 2000))
    done = next(n for n in range(3, 2000) if blocks_wanted(logs[:n], 0.03) == n)
    result = compared(logs[:done])
    assert result.high / result.ratio <= 1.03 + 1e-9


def test_a_width_below_a_percent_is_named_where_no_day_decides_it():
    noisy = compared([0.0, 0.1, -0.1, 0.05, -0.05, 0.0])
    asked = SimpleNamespace(request=SimpleNamespace(names=("a", "b"), width=0.004, minutes=5))
    *_, said = _sentences(asked, SimpleNamespace(), noisy, StopReason.budget_spent)
    assert "difference of 0.4 %" in said
    assert "60 blocks" in said


NOISE = {
    "gaussian": lambda g, shape: g.normal(0, 0.03, shape),
    "t": lambda g, shape: 0.02 * g.standard_t(3, shape),
    "hiccups": lambda g, shape: g.normal(0, np.where(g.random(shape) < 0.1, 0.1, 0.02)),
}


@pytest.mark.parametrize("noise", NOISE)
def test_repeating_it_until_it_claims_something_claims_little_that_is_not(noise):
    logs = NOISE[noise](np.random.default_rng(3), (500, 40))
    claims = [[compared(row[:n]).claim for n in range(3, 41)] for row in logs]
    claimed = ["faster" in some or "slower" in some for some in claims]
    assert np.mean(claimed) <= 0.05


def paired(runs, variant, baseline):
    return list(compared_cells(runs, variant, baseline).log_ratios)


def in_turns(*speeds, device="AMD EPYC 7B13", begin=0):
    """Blocks of (A, B) img/s, one per minute."""
    pairs = enumerate(speeds, begin)
    return [
        run(cell, f"b{n}", speed, minute=n, environment={"device": device, "any_look": True})
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


def test_a_screening_run_makes_no_pair():
    screened = [run(cell, "screening", 10, environment={"purpose": SCREENING}) for cell in "AB"]
    assert paired(table(*screened, *in_turns((200, 100))), "A", "B") == pytest.approx([math.log(2)])


def test_of_two_devices_the_one_that_measured_last_is_compared():
    runs = table(*in_turns((200, 100)), *in_turns((400, 100), device="H200", begin=1))
    assert paired(runs, "A", "B") == pytest.approx([math.log(4)])


def test_two_blocks_claim_nothing_and_none_says_nothing():
    assert compared([0.5, 0.5]).claim == "too few blocks"
    assert math.isnan(compared([]).ratio)


def test_a_setting_whose_runs_failed_in_some_blocks_is_not_called_faster():
    gone = run("A", "gone", status=Status.failed)
    runs = table(*in_turns((200, 100), (210, 100), (205, 100)), gone)
    claims = [compared_cells(runs, *sides).claim for sides in (("A", "B"), ("B", "A"))]
    assert claims == ["missing blocks"] * 2
    other = table(
        *in_turns((200, 100), (210, 100), (205, 100)), run("B", "gone", status=Status.failed)
    )
    assert compared_cells(other, "A", "B").claim == "faster"


def test_the_result_is_a_sentence():
    text = compared([math.log(1.5)] * 3).sentence("O1", "fp32")
    values = {"size": "1.50x [1.50, 1.50]", "blocks": "3 blocks", "claim": "faster"}
    assert text == say("compared", name="O1", base="fp32", **values)


def test_a_width_of_zero_is_refused():
    with pytest.raises(VitsweepError, match="`width=0`"):
        blocks_wanted([0.1] * 9, 0)


def test_the_tables_show_the_interval_and_the_claim_that_compare_printed():
    factors = [1.02, 1.00, 1.03, 1.01, 1.02, 1.01, 1.20, 0.80, 1.30]
    runs = table(*in_turns(*((100 * f, 100) for f in factors)))
    shown = cells(runs, dict.fromkeys("AB", "B")).set_index("cell_id").loc["A"]
    result = compared_cells(runs, "A", "B")
    assert (shown["speedup_low"], shown["speedup_high"]) == pytest.approx((result.low, result.high))
    assert (shown["claim"], shown["speedup"]) == (result.claim, pytest.approx(result.ratio))


def test_the_report_has_a_sentence_of_every_pair_as_the_latest_command_names_it():
    runs = table(*in_turns((200, 100), (210, 100), (205, 100)))
    both = {"A": "B", "B": "B"}
    commands = [
        {"comparison": {"names": ["a", "b"]}, "baselines": both},
        {"comparison": {"names": ["b", "a"]}, "baselines": {"B": "A", "A": "A"}},
        {"comparison": {"names": ["never", "ran"]}, "baselines": {"C": "B", "B": "B"}},
        {"command": "-m x=1,2", "baselines": both},
        {"comparison": {"names": ["again", "b"]}, "baselines": both},
    ]
    said = recorded_comparisons(runs, commands)
    assert [text.split(" has ")[0] for text in said] == ["b", "again"]
    assert "2.05x" in said[1]


def test_the_result_says_where_blocks_resemble_each_other():
    waves = 2 * [0.02, 0.02, 0.02, 0.02, -0.02, -0.02, -0.02, -0.02]
    assert "Consecutive blocks are correlated" in compared(waves).sentence("A", "B")
    quiet = [0.02, -0.02, 0.01, -0.01, 0.02, -0.02, 0.01]
    assert "resemble" not in compared(quiet).sentence("A", "B")


def test_an_interval_lies_within_bounds_outside_or_neither():
    found = compared([0.1, 0.11, 0.12], is_fixed=True)
    low, high = found.low, found.high
    for least, most, answer in (
        (low, high, True),
        (0.5, 2.0, True),
        (low * 1.001, 2.0, None),
        (0.5, high * 0.999, None),
        (0.5, low, None),
        (0.5, low * 0.999, False),
        (high, 2.0, None),
        (high * 1.001, 2.0, False),
    ):
        assert found.lies_within(least, most) is answer, (least, most)
    assert found.half_width == pytest.approx(high / found.ratio - 1)
    assert compared([0.1, 0.2]).lies_within(0.5, 2.0) is None


def test_a_cell_against_itself_has_two_runs_of_each_block():
    runs = table(
        *(
            replace(run("a", f"b{block}", 100.0 + place, minute=10 * block + place), position=place)
            for block in range(8)
            for place in (0, 1)
        )
    )
    own, a, b = _as_two_arms(runs, "a")
    assert (a, b) == ("a A", "a B")
    for block, of_block in own.groupby("block"):
        odd = hashlib.sha256(str(block).encode()).digest()[-1] % 2
        assert (
            of_block.sort_values("position")["cell_id"].tolist()
            == ([b, a] if odd else [a, b])[::-1]
        )
    assert _as_two_arms(runs, "other")[0].empty
    assert compared_cells(runs, "a", "a").num_blocks == 8
