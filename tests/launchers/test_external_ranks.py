"""One cell in ranks that torchrun started."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cells import LAPTOP, TINY, composer
from tests.command import NO_REPORT, QUICK, ROOT, SWEEP, Command
from vitsweep import job_environment
from vitsweep.cli import main
from vitsweep.errors import VitsweepError
from vitsweep.job_environment import init_method, ranks_per_node
from vitsweep.launchers import external_ranks
from vitsweep.launchers.external_ranks import run_in_place
from vitsweep.results.store import Store


@pytest.mark.slow
def test_torchrun_measures_a_cell_and_rank_0_shows_its_row(vitsweep: Command) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "-m", "vitsweep", *QUICK, f"sweep.name={SWEEP}", NO_REPORT],
        cwd=vitsweep.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Sweep default") == 1
    [run] = vitsweep.runs().to_dict("records")
    assert (run["status"], run["world_size"], run["launcher"]) == ("measured", 2, "in place")


def test_several_cells_are_refused_to_ranks_that_run_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    monkeypatch.chdir(tmp_path)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    assert main.run(["-m", "seed=1,2"]) == 2
    assert "make 2 cells" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def of_step(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Let the environment have these variables of torchrun and Slurm, and no others."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_the_ranks_of_a_node_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, ranks in (
        ({}, 8),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_STEP_TASKS_PER_NODE": "4"}, 2),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, 2),
    ):
        of_step(monkeypatch, **variables)
        assert ranks_per_node(8) == ranks
    of_step(monkeypatch, SLURM_STEP_TASKS_PER_NODE="2,1")
    with pytest.raises(VitsweepError, match="`srun --ntasks-per-node=N`"):
        ranks_per_node(3)


def test_the_ranks_meet_at_the_first_node_on_a_port_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = SimpleNamespace(stdout="n1\nn2\n", returncode=0)
    monkeypatch.setattr(job_environment, "captured", lambda *_, **__: answer)
    of_step(monkeypatch, SLURM_STEP_NODELIST="n[1-2]", SLURM_JOB_ID="3", SLURM_STEP_ID="5")
    assert init_method() == "tcp://n1:20296"
    of_step(monkeypatch, SLURM_STEP_NODELIST="n[1-2]", SLURM_JOB_ID="500")
    assert init_method() == "tcp://n1:28500"
    answer.returncode = 1
    of_step(monkeypatch, SLURM_STEP_NODELIST="n7", SLURM_JOB_ID="0")
    assert init_method() == "tcp://n7:20000"
    monkeypatch.setenv("MASTER_ADDR", "here")
    assert init_method() == "env://"


def test_each_rank_runs_its_part_and_rank_0_freezes_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(external_ranks, "Composer", composer)
    monkeypatch.setattr(external_ranks.Machine, "here", lambda: LAPTOP)
    monkeypatch.setattr(external_ranks, "run_rank_in_process", lambda *given: asked.append(given))
    machines: list[float | None] = []
    cells_for = external_ranks.cells_for

    def noted(typed: Any, composer: Any, machine: Any) -> Any:
        machines.append(machine.least_gib)
        return cells_for(typed, composer, machine)

    monkeypatch.setattr(external_ranks, "cells_for", noted)
    typed = ["-q", "--run", *TINY, "precision=O1", "sweep.name=s"]
    for rank, gib in ((1, None), (0, 15.5)):
        profile = gib and SimpleNamespace(usable_bytes=gib * 2**30)
        monkeypatch.setattr(
            external_ranks,
            "profile_of",
            lambda *_, complete, profile=profile: profile if complete else None,
        )
        of_step(monkeypatch, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="1", MASTER_ADDR="here")  # fmt: skip
        found = run_in_place(typed)
        assert (found is None) == (rank == 1)
        request, cell, *place = asked[-1]
        assert (place, request.environment["launcher"]) == ([rank, rank], "in place")
        assert (cell.resources.nodes, cell.resources.ranks_per_node) == (2, 1)
        assert machines[-1] == gib
        assert (Store(tmp_path / "results" / "s").cell(cell.cell_id) / "cell.yaml").exists() == (
            rank == 0
        )
    with pytest.raises(VitsweepError, match="make 2 cells"):
        run_in_place([*typed, "seed=1,2"])
