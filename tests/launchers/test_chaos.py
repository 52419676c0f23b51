"""Random faults on a sweep of this machine, then the same command: one row per cell, nothing lost."""

import pytest

from tests.command import Command
from tools.chaos import Chaos

NUM_CELLS = 20
SECONDS = 120.0
ASKED = ("-m", f"seed=range(0,{NUM_CELLS})", "sweep.baseline=null", "measurement.min_seconds=2")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_random_faults_lose_nothing_and_double_nothing(vitsweep: Command, seed: int) -> None:
    Chaos(vitsweep, ASKED, NUM_CELLS, seed).check(SECONDS)
