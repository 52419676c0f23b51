"""A race on a cluster: rounds as job arrays."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.command import Command
from tests.launchers.slurm.conftest import (
    SlurmClient,
    cluster,
    eventually,
    slurm_environ,
    slurm_packages,
)
from tests.launchers.slurm.sweeps import SMALL, Sweep
from vitsweep.extras.race.table import read_race

__all__ = ["cluster", "slurm_environ", "slurm_packages"]

KILLS = 20


@pytest.fixture
def sweep(vitsweep: Command, slurm_environ: SlurmClient) -> Iterator[Sweep]:
    yield Sweep(vitsweep, slurm_environ)
    slurm_environ.cancel_all()


@pytest.mark.full
def test_rounds_are_job_arrays_until_the_race_has_ended(sweep: Sweep) -> None:
    grid = ("precision=fp32,O1", "optimizer=adamw_loop,adamw_fused")
    sweep.run(*grid, "sweep.search=race", "sweep.confirm=1")
    race = read_race(sweep.command.store.root)
    assert race["ended"] == "halved"
    assert race["leader"]
    arrays = sweep.arrays
    assert len(arrays) >= 2
    runs = [run for array in arrays for job in array.jobs() for run in job.runs()]
    assert len(runs) == race["num_runs"] == len(list(sweep.command.store.runs()))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_race_whose_command_is_killed_after_each_round_goes_on_with_its_jobs(
    sweep: Sweep,
) -> None:
    grid = ("-m", *SMALL, "precision=fp32,O1", "optimizer=adamw_loop,adamw_fused")
    words = (*grid, "sweep.search=race", "sweep.confirm=1")
    for _ in range(KILLS):
        known = len(sweep.arrays)
        running = sweep.command.start(*words)
        begun = lambda n=known, r=running: len(sweep.arrays) > n or r.poll() is not None  # noqa: E731
        eventually(begun, 300, "a round, or the end")
        if running.poll() is not None:
            running.communicate()
            break
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    done = sweep.command(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    race = read_race(sweep.command.store.root)
    assert race["ended"] == "halved"
    assert race["confirmed"]
    runs = [run for array in sweep.arrays for job in array.jobs() for run in job.runs()]
    assert len(runs) == race["num_runs"] == len(list(sweep.command.store.runs()))


@pytest.mark.slow
def test_of_two_commands_of_one_race_one_races(sweep: Sweep) -> None:
    """Each would choose from the other's fresh runs, and both would measure the same blocks."""
    grid = ("-m", *SMALL, "precision=fp32,O1")
    words = (*grid, "sweep.search=race", "sweep.confirm=0")
    first = sweep.command.fork(*words)
    eventually(lambda: sweep.arrays != [] or first.poll() is not None, 300, "a round")
    local = [word for word in words if not word.startswith("hydra/launcher")]
    for refused in [sweep.command.fork(*second) for second in (words, local)]:
        _, error = refused.communicate()
        assert refused.returncode == 2
        assert "Another command chooses the rounds of" in error
    out, error = first.communicate(timeout=600)
    assert first.returncode == 0, out + error
    race = read_race(sweep.command.store.root)
    planned = [run for array in sweep.arrays for job in array.jobs() for run in job.runs()]
    runs = list(sweep.command.store.runs())
    assert len(planned) == len({run.run_id for run in runs}) == race["num_runs"]
    assert {run.environment["launcher"] for run in runs} == {"slurm"}
