"""A record of many ranks stays small: it holds the steps of the slowest one, which give its speed."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.builders import run
from vitsweep.report.views import samples as step_table
from vitsweep.results import record
from vitsweep.results.record import RunRecord, recorded_samples

STEPS, WARM_UP = 60, 10


def of_ranks(ranks: int) -> dict[str, Any]:
    """Times in which rank 3 is the slowest of the window, though not with its first steps."""
    times = np.random.default_rng(0).normal(100, 1, (ranks, STEPS))
    times[3] += 5
    times[1, 0] = 10_000
    return {
        "step_time_ms": times.round(4).tolist(),
        "data_wait_ms": (times / 100).round(4).tolist(),
        "skipped": [step == 20 for step in range(STEPS)],
        "warm_up_steps": WARM_UP,
    }


def test_every_step_of_few_ranks_is_in_the_record() -> None:
    assert recorded_samples(of_ranks(64)) == of_ranks(64)


def test_a_record_of_2048_ranks_is_small_and_holds_the_slowest() -> None:
    full = of_ranks(2048)
    whole = replace(run("a"), samples=full)
    kept = replace(whole, samples=recorded_samples(full))
    again = RunRecord.from_json(kept.to_json())
    assert len(whole.to_json()) > 10 * len(kept.to_json())
    assert again.samples["ranks"] == [3]
    assert set(step_table([again])["rank"]) == {3}


def test_a_record_of_too_many_steps_leaves_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_TIMES", STEPS)
    full = of_ranks(4)
    kept = recorded_samples(full)
    assert (kept["ranks"], len(kept["step_time_ms"][0])) == ([3], STEPS)
    monkeypatch.setattr(record, "MOST_TIMES", STEPS - 1)
    again = RunRecord.from_json(replace(run("a"), samples=recorded_samples(full)).to_json())
    assert step_table([again]).empty
