"""A record of many ranks stays small; what it leaves out lies beside it, and its steps give its speed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.builders import run
from vitsweep.report.views import samples as step_table
from vitsweep.results import record
from vitsweep.results.record import SAMPLES_FILE, RunRecord, recorded_samples

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


def test_every_step_of_few_ranks_is_in_the_record(tmp_path: Path) -> None:
    assert recorded_samples(of_ranks(64), tmp_path) == of_ranks(64)
    assert not any(tmp_path.iterdir())


def test_a_record_of_2048_ranks_is_small_and_gives_the_same_throughput(tmp_path: Path) -> None:
    full = of_ranks(2048)
    whole = replace(run("a"), samples=full)
    kept = replace(whole, samples=recorded_samples(full, tmp_path))
    again = RunRecord.from_json(kept.to_json())
    assert len(whole.to_json()) > 10 * len(kept.to_json())
    assert again.samples["ranks"] == [3]
    assert set(step_table([again])["rank"]) == {3}
    window = np.delete(np.array(full["step_time_ms"]), [*range(WARM_UP), 20], axis=1)
    medians = again.samples["by_rank"]["step_time_ms_median"]
    assert medians == pytest.approx(np.median(window, axis=1), abs=1e-4)


def test_a_record_of_too_many_steps_leaves_them_beside_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(record, "MOST_TIMES", STEPS)
    full = of_ranks(4)
    kept = recorded_samples(full, tmp_path)
    assert (kept["ranks"], len(kept["step_time_ms"][0])) == ([3], STEPS)
    monkeypatch.setattr(record, "MOST_TIMES", STEPS - 1)
    again = RunRecord.from_json(
        replace(run("a"), samples=recorded_samples(full, tmp_path)).to_json()
    )
    assert again.samples["by_rank"] == kept["by_rank"]
    assert step_table([again]).empty
    assert len(pd.read_parquet(tmp_path / SAMPLES_FILE)) == 4 * STEPS


def test_every_step_of_every_rank_lies_beside_the_record(tmp_path: Path) -> None:
    full = of_ranks(65)
    recorded_samples(full, tmp_path)
    found = pd.read_parquet(tmp_path / SAMPLES_FILE)
    for name in ("step_time_ms", "data_wait_ms"):
        assert (
            found.pivot(index="rank", columns="step", values=name).to_numpy().tolist() == full[name]
        )
    of_rank = found[found["rank"] == 64]
    assert of_rank["skipped"].tolist() == full["skipped"]
    assert of_rank["warm_up"].sum() == WARM_UP
