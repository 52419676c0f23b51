"""Screening runs on a cluster: at the start of a job."""

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.command import Command
from tests.launchers.slurm.conftest import SlurmClient
from tests.launchers.slurm.sweeps import Sweep
from vitsweep.launchers.slurm.state.poll import poll

CELLS = (
    "measurement=standard",
    "measurement.warmup_min_seconds=0",
    "measurement.min_seconds=0.05",
    "measurement.prove=none",
    "optimizer=adamw_foreach",
    "memory._target_=vitsweep.spec.technique.Memory,tests.faults.SlowSteps",
)
"""One like its baseline, and one that is many times slower; the baseline is added."""


@pytest.fixture
def sweep(vitsweep: Command, slurm_environ: SlurmClient) -> Iterator[Sweep]:
    yield Sweep(vitsweep, slurm_environ)
    slurm_environ.cancel_all()


# 20 s: a job of Slurm that measures a slow cell, and the same command again.
@pytest.mark.slow
def test_a_slow_cell_is_pruned_by_the_screening_of_its_job(sweep: Sweep) -> None:
    cells = sweep.run(*CELLS)
    runs = list(sweep.command.store.runs())
    assert Counter(run.is_screening for run in runs) == {True: 3, False: 10}
    assert sorted(cells["blocks"]) == [0, 5, 5]
    assert cells["speedup_note"].str.contains("screening run").sum() == 1
    assert sweep.events.of_kind("warm_up_start") == [], "screening runs warm the node up"
    [state] = poll(sweep.command.store)
    assert state.remaining_runs == []
    assert not any(run.environment.get("any_look") for run in runs)
    before = len(sweep.arrays)
    sweep.run(*CELLS)
    assert len(sweep.arrays) == before, "nothing is missing"
