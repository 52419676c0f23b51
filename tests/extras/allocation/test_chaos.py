"""Random faults on a sweep of an allocation, then the same command: one row per cell, nothing lost."""

import pytest

from tests.command import Command
from tools.allocation_chaos import TWO_OF_THREE_NODES, AllocationChaos

NUM_CELLS = 20
SECONDS = 120.0


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_random_faults_lose_nothing_and_double_nothing(vitsweep: Command, seed: int) -> None:
    asked = (
        "-m", f"seed=range(0,{NUM_CELLS})", *TWO_OF_THREE_NODES, "sweep.baseline=null",
        "measurement.min_seconds=2",
    )  # fmt: skip
    chaos = AllocationChaos(vitsweep, asked, NUM_CELLS, seed)
    chaos.check(SECONDS)
    assert chaos.struck["kill agent"] + chaos.struck["kill node"]
