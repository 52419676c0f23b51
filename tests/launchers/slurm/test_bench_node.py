"""slurm/bench_node.sbatch: its commands are valid on 8 GPUs, and it runs on a real Slurm with tiny models."""

import os
import shlex
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from slurm import local_cluster
from tests.cells import GPU_NODE, composer
from tests.launchers.slurm.conftest import SlurmClient
from vitsweep.composition.grid import expand
from vitsweep.planning.sweep_plan import plan_cell

ROOT = Path(local_cluster.__file__).parents[1]
SCRIPT = ROOT / "slurm" / "bench_node.sbatch"
SWEEPS = ("scaling", "images_by_length", "videos_by_length", "overlap")


def test_every_cell_is_valid_on_a_node_of_eight_gpus(tmp_path: Path) -> None:
    told = tmp_path / "told"
    python = tmp_path / "python"
    # A part of the benchmark on one GPU without figures: the node's hours are for the sweeps.
    fails = "[ $1 != benchmarks/gpu.py ]"
    python.write_text(f'#!/bin/bash\nprintf "%q " "$@" >> {told}\necho >> {told}\n{fails}\n')
    python.chmod(0o755)
    subprocess.run(["bash", SCRIPT], env=os.environ | {"PYTHON": str(python)}, check=True)
    first, *commands = [shlex.split(line) for line in told.read_text().splitlines()]
    assert (ROOT / first[0]).is_file()
    assert len(commands) == len(SWEEPS)
    for command, name in zip(commands, SWEEPS, strict=True):
        assert command[:4] == ["-m", "vitsweep", "-m", f"sweep.name=bench_node_{name}"]
        grid = [o for o in command[3:] if not o.startswith("hydra/")]
        for tree in expand(grid, composer()):
            planned = plan_cell(tree, GPU_NODE)
            assert planned.reasons == (), tree
            assert planned.spec.precision.name != "bf16", "of which FSDP gathers float32"


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_it_runs_on_a_real_slurm(cluster: SlurmClient, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    environment = f"--export=ALL,SMOKE=1,PYTHON={ROOT / '.venv/bin/python'},PYTHONPATH={ROOT}"
    job = cluster.run(
        *("sbatch", "--parsable", "--gpus-per-node=0", environment),
        *(f"--chdir={tmp_path}", f"--output={tmp_path}/log", SCRIPT),
    )
    cluster.wait(job, "COMPLETED", "FAILED", "TIMEOUT", seconds=1500)
    log = (tmp_path / "log").read_text()
    assert cluster.states(job) == ["COMPLETED"], log
    for name in SWEEPS:
        folder = tmp_path / "results" / f"bench_node_{name}"
        cells = pd.read_parquet(folder / "cells.parquet")
        assert set(cells["status"]) == {"measured"}, log
    assert list((tmp_path / "results" / "bench_node_overlap").rglob("*.json.gz"))
