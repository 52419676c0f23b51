"""A race on a cluster: rounds as job arrays."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Command
from tests.launchers.slurm.chaos import write_dying_sbatch
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


def planned(sweep: Sweep) -> int:
    """Return how many runs the arrays have that Slurm took; a killed command may leave others."""
    taken = [array for array in sweep.arrays if array.slurm_id]
    return sum(len(job.runs()) for array in taken for job in array.jobs())


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
@pytest.mark.timeout(1200)
def test_a_race_whose_command_dies_around_each_sbatch_runs_each_round_once(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "-m", *SMALL, "precision=fp32,O1", "optimizer=adamw_loop,adamw_fused", "sweep.search=race",
        "sweep.confirm=1",
    )  # fmt: skip
    for when in 2 * ("dies_before", "dies_after"):  # of the halving, then of the fresh blocks
        write_dying_sbatch(tmp_path / when)
        with monkeypatch.context() as dying:
            dying.setenv("PATH", f"{tmp_path / when}:{os.environ['PATH']}")
            assert sweep.command(*words).returncode == -signal.SIGKILL
        if when == "dies_before":  # the next command would wait for its `sbatch`
            folder, facts = sweep.arrays[-1].folder, sweep.arrays[-1].facts
            (folder / "array.json").write_text(json.dumps(facts | {"time": time.time() - 3600}))
    done = sweep.command(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    race = read_race(sweep.command.store.root)
    assert race["ended"] == "halved"
    assert race["confirmed"]
    assert [bool(array.slurm_id) for array in sweep.arrays] == [False, True, False, True]
    assert planned(sweep) == 4 + 3 == race["num_runs"] == len(list(sweep.command.store.runs()))


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
    assert planned(sweep) == race["num_runs"] == len(list(sweep.command.store.runs()))


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
