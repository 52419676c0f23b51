"""Whoever looks at a sweep on a real Slurm changes nothing, and takes no live job for dead."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm import local_cluster
from tests.command import Command
from tests.launchers.slurm.conftest import SlurmClient, eventually
from tests.launchers.slurm.other_user import OtherUser
from tests.launchers.slurm.sweeps import Held, Sweep


@pytest.fixture
def sweep(state_folder: Path, slurm_environ: SlurmClient) -> Iterator[Sweep]:
    """A sweep in a folder that every user may enter."""
    yield Sweep(Command(state_folder.parent), slurm_environ)
    slurm_environ.cancel_all()


@pytest.mark.full
def test_another_user_looks_at_a_sweep_that_a_job_is_filling(sweep: Sweep) -> None:
    other = OtherUser.found()
    if other is None:
        pytest.skip("only root can become another user, who must reach a Python")
    held = Held(sweep.command.folder)
    sweep.submit(*held.cell, "sharding=ddp,fsdp", "sweep.baseline=null")
    eventually(held.is_waiting, 400, "the run")
    root = sweep.command.store.root
    for path in [root, *root.rglob("*")]:
        path.chmod(0o777)  # whatever is not written is not for lack of permission

    shown = other.vitsweep("status", str(root))
    assert shown.returncode == 0, shown.stderr
    assert sweep.until_running() in shown.stdout, "the cell that runs now"
    assert other.files_in(root) == []
    acted = other.vitsweep("collect", str(root), "--reconcile")
    assert acted.returncode == 0, acted.stderr
    assert list(sweep.command.store.runs()) == []

    held.go_on()
    assert sweep.until_ended()["status"].tolist() == ["measured", "measured"]
    assert sweep.command.runs()["status"].tolist() == ["measured", "measured"]


@pytest.mark.full
def test_a_status_from_another_cluster_changes_nothing(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = "+hydra.launcher.additional_parameters.hold=true"
    sweep.submit("sharding=ddp,fsdp", "sweep.baseline=null", hold)
    other = local_cluster.Cluster(sweep.command.folder / "cluster")
    other.start(nodes=1, accounting="none")
    try:
        with monkeypatch.context() as elsewhere:
            for name, value in other.env.items():
                elsewhere.setenv(name, value)
            shown = [sweep.command(verb, quick=False) for verb in ("status", "collect")]
            sweep.command("collect", "--reconcile", quick=False)
    finally:
        other.stop()
    assert [done.returncode for done in shown] == [0, 0], shown
    assert "cluster local" in shown[0].stdout
    assert list(sweep.command.store.runs()) == []

    sweep.client.run("scontrol", "release", sweep.job)
    assert sweep.until_ended()["status"].tolist() == ["measured", "measured"]
    assert sweep.command.runs()["status"].tolist() == ["measured", "measured"]
