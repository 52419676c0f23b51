"""Rounds on several nodes of a job of Slurm, by the script that its launcher names."""

import subprocess
import sys

import pytest

from tests.command import NO_REPORT, QUICK, ROOT, SWEEP, Command
from tests.launchers.slurm.conftest import SlurmClient, cluster, slurm_packages

__all__ = ["cluster", "slurm_packages"]


@pytest.mark.full
def test_the_script_of_one_job_bounds_a_sweep_on_two_nodes(
    cluster: SlurmClient, vitsweep: Command
) -> None:
    script, log = ROOT / "slurm" / "sweep_in_one_job.sbatch", vitsweep.folder / "job.out"
    options = ("--nodes=2", "--gpus-per-node=0", "--time=20", f"--output={log}")
    words = (
        *QUICK, NO_REPORT, f"sweep.name={SWEEP}", "resources.nodes=2,1", "resources.ranks_per_node=1",
        "sweep.match=[model]", "sweep.minutes=0.3", "measurement.blocks=3",
    )  # fmt: skip
    done = subprocess.run(
        ["sbatch", "--wait", *options, script, *words],
        env=cluster.env | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        cwd=vitsweep.folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    runs = vitsweep.runs()
    assert set(runs["launcher"]) == {"allocation"}
    assert {"127.0.0.1,127.0.0.2", "127.0.0.1"} <= set(runs["nodes_used"])
    [line] = vitsweep.store.commands()
    assert line["allocation"]["job"].startswith("scancel ")
