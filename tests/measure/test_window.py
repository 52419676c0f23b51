"""The timed window: throughput is images over its elapsed time on the slowest rank."""

import numpy as np
import pytest

from vitsweep.measure.summarize import UNEVEN, summarize_window

NO_WAIT = [0.0] * 6


def window(ranks: list[list[float]], skipped: list[bool] | None = None, warmup: int = 0, **given):
    skipped = skipped or [False] * len(ranks[0])
    waits = given.get("waits") or [[0.0] * len(ranks[0]) for _ in ranks]
    return summarize_window(ranks, skipped, warmup, waits)


def test_a_loader_that_stalls_now_and_then_counts_with_its_stalls() -> None:
    """Prefetched batches hide the stalls from a median: 80 ms, where a step takes 147 ms."""
    times = [82.0, 76.0, 82.0, 78.0, 305.0, 82.0, 77.0, 80.0, 310.0, 298.0]
    found = window([times])
    assert found.metrics["step_time_ms"] == pytest.approx(np.mean(times))
    assert found.uneven is True
    assert found.steps == 10
    assert found.metrics["window_seconds"] == pytest.approx(sum(times) / 1e3)


def test_jitter_of_the_ranks_does_not_add_up() -> None:
    """Each rank is late in other steps: both finish 4 steps in the same time."""
    found = window([[10.0, 20.0, 10.0, 20.0], [20.0, 10.0, 20.0, 10.0]])
    assert found.metrics["step_time_ms"] == 15.0, "not 20, the mean of the slower rank of each step"


def test_the_slowest_rank_counts() -> None:
    found = window([[10.0, 10.0, 10.0, 10.0], [12.0, 14.0, 12.0, 14.0]])
    assert found.metrics["step_time_ms"] == 13.0


def test_skipped_steps_are_in_neither_images_nor_time() -> None:
    found = window([[10.0, 2.0, 20.0, 2.0]], skipped=[False, True, False, True])
    assert found.steps == 2
    assert found.metrics["step_time_ms"] == 15.0
    assert found.metrics["window_seconds"] == pytest.approx(0.030)


def test_a_window_of_skipped_steps_has_no_time() -> None:
    found = window([[10.0, 10.0]], skipped=[True, True])
    assert found.steps == 0
    assert found.metrics == {}
    assert found.uneven is None
    assert found.uneven_cause is None


def test_warm_up_is_left_out_of_the_window() -> None:
    found = window([[900.0, 500.0, *[10.0] * 8]], warmup=2)
    assert found.metrics["step_time_ms"] == 10.0
    assert found.warmup_steps == 2


def test_uneven_steps_are_flagged_with_the_data_as_their_cause_where_steps_waited_for_it() -> None:
    times = [80.0, 80.0, 80.0, 300.0, 80.0, 80.0, 80.0, 300.0]
    waits = [1.0, 1.0, 1.0, 215.0, 1.0, 1.0, 1.0, 220.0]
    found = window([times], waits=[waits])
    assert found.uneven is True
    assert found.uneven_cause == "data"
    assert found.metrics["data_wait_ms"] == pytest.approx(np.mean(waits))
    assert window([times]).uneven is True
    assert window([times]).uneven_cause == "unknown"


def test_data_explain_half_of_what_slow_steps_take_beyond_the_median() -> None:
    """Two of five steps take 100 and 60 ms more than the median of 80: 160 ms, of which 80 are half."""
    times = [80.0, 180.0, 80.0, 140.0, 80.0]
    for waits, cause in (
        ([10.0, 50.0, 10.0, 50.0, 10.0], "data"),
        ([10.0, 50.0, 10.0, 49.0, 10.0], "unknown"),
        ([10.0, 90.0, 10.0, 0.0, 10.0], "data"),
        ([0.0, 79.0, 30.0, 0.0, 0.0], "unknown"),
    ):
        assert window([times], waits=[waits]).uneven_cause == cause, waits
    evens = [100.0, 100.0, 100.0, 140.0], [100.0, 100.0, 100.0, 144.0]
    assert [window([even]).uneven for even in evens] == [False, True], "means of 110 and 111"


def test_a_wait_on_another_rank_explains_the_slowest_one() -> None:
    """Ranks wait for each other in collectives: who reads late is not always who is slowest."""
    times = [80.0, 80.0, 80.0, 300.0, 80.0, 80.0, 80.0, 300.0]
    waits = [[0.0] * 8, [0.0, 0.0, 0.0, 215.0, 0.0, 0.0, 0.0, 215.0]]
    assert window([times, times], waits=waits).uneven_cause == "data"


def test_ordinary_noise_is_even() -> None:
    times = list(100 * np.exp(np.random.default_rng(0).normal(0, 0.05, 50)))
    found = window([times])
    assert found.uneven is False
    assert found.uneven_cause is None
    assert UNEVEN == 1.1
