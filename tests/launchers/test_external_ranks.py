"""One cell in ranks that torchrun started."""

import os
import subprocess
import sys

import pytest

from tests.command import QUICK, ROOT, SWEEP, Command


@pytest.mark.slow
def test_torchrun_measures_a_cell_and_rank_0_shows_its_row(vitsweep: Command) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, "-m", "vitsweep", *QUICK, f"sweep.name={SWEEP}"],
        cwd=vitsweep.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Report: results/default/report/index.html") == 1
    [run] = vitsweep.runs().to_dict("records")
    assert (run["status"], run["world_size"], run["launcher"]) == ("measured", 2, "in place")


@pytest.mark.slow
def test_several_cells_are_refused_to_ranks_that_run_already(vitsweep: Command) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ended = subprocess.run(
        [sys.executable, "-m", "vitsweep", "-m", "seed=1,2"],
        cwd=vitsweep.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | ranks,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 2
    assert "make 2 cells" in ended.stderr
