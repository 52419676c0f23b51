"""The faults of several nodes on a sweep: agents and whole nodes are killed, and nothing is lost."""

import pytest

from tests.command import Command
from tests.launchers.test_chaos import ASKED, NUM_CELLS, SECONDS
from tools.allocation_chaos import TWO_OF_THREE_NODES, AllocationChaos


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_agents_and_nodes_that_die_cost_no_run(vitsweep: Command, seed: int) -> None:
    chaos = AllocationChaos(vitsweep, (*ASKED, *TWO_OF_THREE_NODES), NUM_CELLS, seed)
    chaos.check(SECONDS)
    assert chaos.struck["kill agent"] + chaos.struck["kill node"]
