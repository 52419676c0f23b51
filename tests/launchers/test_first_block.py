"""Sweeps without screening runs, as on a GPU: the first block replaces them."""

import re
from collections import Counter

import pytest

from tests.command import Command
from vitsweep.spec.menu import conf_dir

POLICY = (
    "sweep.screening=false",
    "sweep.prune_slowdown=8",
    "measurement=three_blocks",  # typed, no cell would be pruned
    "measurement.warmup_min_seconds=0.05",
    "measurement.measured_steps=4",
    "measurement.min_seconds=0.25",
    "measurement.max_seconds=1",  # the slow cell takes as few steps as can be
    "measurement.prove=none",
    "optimizer=adamw_foreach",
    "memory._target_=vitsweep.spec.technique.Memory,tests.faults.SlowSteps,tests.faults.Stalls",
)
"""A cell like its baseline, one that is many times slower, and one whose steps are uneven."""


@pytest.mark.slow  # 15 s: seven real runs, one of them many times slower than the others
def test_the_first_block_ends_slow_cells_and_counts_for_the_others(vitsweep: Command) -> None:
    choice = vitsweep.folder / "conf" / "measurement" / "three_blocks.yaml"
    choice.parent.mkdir(parents=True)
    choice.write_text(
        (conf_dir() / "measurement" / "standard.yaml").read_text().replace("blocks: 5", "blocks: 3")
    )
    asked = ("-m", "--config-dir", "conf", *POLICY)
    done = vitsweep(*asked)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert re.search(r"Warm-up.*: \S+.*discarded", said)
    assert re.search(r" 0\.0\d+x \(no interval\) .* 1$", said, re.M), "the slow cell"
    runs = list(vitsweep.store.runs())
    counted = Counter(run.cell_id for run in runs)
    fastest = {
        cell: min(r.metrics["step_time_ms"] for r in runs if r.cell_id == cell) for cell in counted
    }
    slow = max(counted, key=lambda cell: fastest[cell] or 0.0)
    assert not any(run.is_screening for run in runs)
    assert {cell: 1 if cell == slow else 3 for cell in counted} == counted
    assert {run.spec["measurement.min_seconds"] for run in runs} == {0.25}, "uneven steps or not"
    again = vitsweep(*asked)
    assert "measured already" in again.stderr
