"""Random faults on a sweep of a real Slurm, then the same command: one row per cell, nothing lost."""

from pathlib import Path

import pytest

from tests.command import Command
from tests.launchers.slurm.conftest import SlurmClient
from tests.launchers.slurm.sweeps import SMALL
from tools.slurm_chaos import PREEMPTED_WITHOUT_GRACE, SlurmChaos

NUM_CELLS = 20
SECONDS = 120.0


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_random_faults_lose_nothing_and_double_nothing(
    state_folder: Path, slurm_environ: SlurmClient, seed: int
) -> None:
    asked = (
        "-m", f"seed=range(0,{NUM_CELLS // 2})", "resources.nodes=1,2", *SMALL,
        "resources.ranks_per_node=1", "measurement.min_seconds=2", "sweep.baseline=null",
        "hydra.launcher.cells_per_job=6", PREEMPTED_WITHOUT_GRACE,
    )  # fmt: skip
    SlurmChaos(Command(state_folder.parent), asked, NUM_CELLS, seed, slurm_environ).check(SECONDS)
