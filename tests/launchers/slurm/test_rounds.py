"""What rounds cannot do on a cluster."""

import pytest

from tests.launchers.slurm.test_packing import plan, settings
from vitsweep.errors import BadValueError
from vitsweep.launchers.slurm.submit.launch import check_rounds, only_request


def test_a_race_waits_for_its_rounds() -> None:
    with pytest.raises(
        BadValueError, match=r"launcher\.wait=false`: each round of `sweep.search=r"
    ):
        check_rounds(settings(wait=False), "sweep.search=race")
    check_rounds(settings(), "sweep.search=race")


def test_cells_with_different_resources_are_not_raced() -> None:
    assert (
        only_request(plan("sharding=ddp,fsdp").runnable, settings(), "sweep.search=race").nodes == 1
    )
    with pytest.raises(BadValueError, match=r"these ask for different resources \(n1x\d, n2x\d,"):
        only_request(plan("resources.nodes=1,2").runnable, settings(), "sweep.minutes=3")
