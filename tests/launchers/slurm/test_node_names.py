"""Nodes whose names nobody can resolve, on a cluster of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm import local_cluster
from tests.command import Command
from tests.launchers.slurm.conftest import SlurmClient
from tests.launchers.slurm.sweeps import Sweep

pytestmark = pytest.mark.full


@pytest.fixture
def nameless(
    slurm_packages: None, state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmClient]:
    """Two nodes called `no-such-name1` and `no-such-name2`, and no accounting."""
    cluster = local_cluster.Cluster(state_folder)
    cluster.start(nodes=2, prefix="no-such-name", accounting="none")
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    yield SlurmClient(cluster)
    cluster.stop()


def test_ranks_meet_where_names_do_not_resolve_and_there_is_no_accounting(
    vitsweep: Command, nameless: SlurmClient
) -> None:
    sweep = Sweep(vitsweep, nameless)
    cells = sweep.run(
        "sharding=fsdp", "sweep.baseline=null", "resources.nodes=2", "resources.ranks_per_node=1"
    )
    assert cells["status"].tolist() == ["measured"]
    assert cells["nodes_used"].tolist() == ["no-such-name1,no-such-name2"]
