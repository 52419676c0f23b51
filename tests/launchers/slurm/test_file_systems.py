"""Results on a disk that is full, and on a shared file system that stands still for a while."""

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Command
from tests.launchers.slurm.conftest import SlurmClient, eventually
from tests.launchers.slurm.sweeps import SMALL, Held, Sweep
from tests.small_disk import fill, small_disk
from vitsweep.results.store import Store


@pytest.fixture
def sweep(vitsweep: Command, slurm_environ: SlurmClient) -> Iterator[Sweep]:
    yield Sweep(vitsweep, slurm_environ)
    slurm_environ.cancel_all()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A results folder on a disk of its own."""
    with small_disk(tmp_path / "disk", mib=8) as folder:
        yield folder


@pytest.mark.full
def test_a_full_disk_ends_the_job_and_its_cells_run_again(sweep: Sweep, disk: Path) -> None:
    held = Held(sweep.command.folder)
    asked = [*held.cell, "sharding=fsdp", "sweep.baseline=null", f"sweep.folder={disk}"]
    sweep.submit(*asked)
    store = Store(disk / "default")
    eventually(held.is_waiting, 400, "the run")
    fill(disk / "filler")
    held.go_on()
    job = next(store.root.glob("jobs/*/slurm_id")).read_text() + "_0"
    sweep.client.wait(job, "FAILED", seconds=400)
    (disk / "filler").unlink()

    told = sweep.command("collect", str(store.root), "--reconcile", quick=False)
    assert "killed" in told.stdout, told.stderr
    [record] = store.runs()
    assert record.reason.endswith(f": {os.strerror(errno.ENOSPC)}.")
    assert sweep.command("-m", *asked, *SMALL).returncode == 0
    assert sorted(str(run.status) for run in store.runs()) == ["killed", "measured"]


class SharedDisk:
    """A file system whose server can stand still, as that of a cluster does under load.

    Every access waits meanwhile, reading and writing.

    Args:
        folder: where it is mounted.
        server: the process that serves it.
    """

    def __init__(self, folder: Path, server: "subprocess.Popen[bytes]") -> None:
        self.folder, self._server = folder, server

    def stall(self) -> None:
        self._server.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._server.send_signal(signal.SIGCONT)


@pytest.fixture
def shared_disk(tmp_path: Path) -> Iterator[SharedDisk]:
    """A folder behind bindfs, which is a FUSE server."""
    if not shutil.which("bindfs") or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs /dev/fuse and bindfs: apt-get install bindfs")
    folder, behind = tmp_path / "shared", tmp_path / "behind"
    folder.mkdir()
    behind.mkdir()
    # without caches in the kernel, so that every access asks the server
    options = "attr_timeout=0,entry_timeout=0,negative_timeout=0"
    server = subprocess.Popen(["bindfs", "-f", "-o", options, behind, folder])
    disk = SharedDisk(folder, server)
    try:
        eventually(lambda: os.path.ismount(folder), 300, "the mount")
        yield disk
    finally:
        disk.go_on()
        subprocess.run(["umount", "-l", folder], check=True)
        server.wait(30)


@pytest.mark.full
def test_a_run_outlasts_a_shared_file_system_that_stands_still(
    shared_disk: SharedDisk, sweep: Sweep
) -> None:
    held = Held(sweep.command.folder)  # not on the shared disk
    asked = [*held.cell, "sharding=ddp,fsdp", "sweep.baseline=null"]
    sweep.submit(*asked, f"sweep.folder={shared_disk.folder}")
    store = Store(shared_disk.folder / "default")
    eventually(held.is_waiting, 400, "the run")
    shared_disk.stall()
    reader = sweep.command.start("status", str(store.root), quick=False)
    held.go_on()  # the ranks, the agent and the coordinator all meet the stalled disk
    time.sleep(80)  # the fault itself; a heartbeat is written every 30 s
    assert reader.poll() is None, "it waits with the disk"
    shared_disk.go_on()

    out, _ = reader.communicate(timeout=400)
    assert "killed" not in out
    job = next(store.root.glob("jobs/*/slurm_id")).read_text() + "_0"
    sweep.client.wait(job, "COMPLETED", seconds=180)
    assert sorted((r.attempt, str(r.status)) for r in store.runs()) == [(1, "measured")] * 2
