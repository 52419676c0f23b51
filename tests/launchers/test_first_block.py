"""Sweeps without looks, as on a GPU: the first block takes their place."""

import re
from collections import Counter
from statistics import median

import pytest

from tests.command import Command
from vitsweep.results.record import RunRecord
from vitsweep.spec.measurement import LONGER

POLICY = (
    "sweep.screening=false",
    "sweep.prune_slowdown=30",
    "measurement=standard",
    "measurement.warmup_min_seconds=0.05",
    "measurement.measured_steps=4",
    "measurement.min_seconds=0.25",
    "measurement.prove=none",
    "optimizer=adamw_foreach",
    "memory._target_=vitsweep.spec.technique.Memory,tests.faults.SlowSteps,tests.faults.Stalls",
)
"""A cell like its baseline, one that is many times slower, and one whose steps are uneven."""


@pytest.mark.slow  # 40 s: five blocks of three cells, one of them many times slower, another in runs of 3x
def test_the_first_block_ends_slow_cells_and_lengthens_the_runs_of_uneven_ones(
    vitsweep: Command,
) -> None:
    done = vitsweep("-m", *POLICY)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert re.search(r"Warm-up of the machine: \S+.* runs for a second, discarded", said)
    assert re.search(r"img/s, about \S+ slower \(no interval\)", said), "the slow cell"
    assert said.count("its runs last 3x") >= 1
    runs = list(vitsweep.store.runs())
    counted = Counter(run.cell_id for run in runs if not run.is_look)
    slow = {r.cell_id for r in runs if r.metrics["step_time_ms"] > 400}
    assert sum(counted[c] for c in slow) <= 1, "no second block"
    looked = {run.cell_id for run in runs if run.is_look}  # others may be uneven on a busy machine
    even = {r.cell_id for r in runs if r.metrics["step_time_ms"] <= 2 * _median(r)}
    assert {r.cell_id for r in runs} - even <= looked
    for run in runs:
        is_longer = run.cell_id in looked and not run.is_look
        assert run.spec["measurement.min_seconds"] == 0.25 * (LONGER if is_longer else 1)
    blocks = vitsweep.cells().set_index("cell_id")["blocks"].drop(slow)
    assert (blocks >= 5).all()
    again = vitsweep("-m", *POLICY)
    assert "Everything that was asked for is measured already." in again.stderr


def _median(run: RunRecord) -> float:
    """Return the median step time of the first rank's window in ms."""
    return median(run.samples["step_time_ms"][0][run.samples["warm_up_steps"] :])
