"""Calibration on this machine."""

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from tests.cells import entry
from vitsweep.cli.doctor import measure_rank
from vitsweep.execution.rank_processes import LocalRanks, fork_server


def launcher(pids: Connection, folder: Path) -> None:
    """Start one of two calibration ranks, which then waits for the other one."""
    arguments = (entry("sharding=ddp").spec, f"file://{folder}/rendezvous", str(folder / "answer"))
    ranks = LocalRanks(fork_server(), measure_rank, arguments, [0], folder)
    pids.send([process.pid for process in ranks._processes])
    time.sleep(600)


@pytest.mark.slow
def test_calibration_ranks_end_with_their_launcher_and_leave_nothing(tmp_path: Path) -> None:
    received, pids = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=launcher, args=(pids, tmp_path))
    process.start()
    [rank] = map(psutil.Process, received.recv())
    deadline = time.monotonic() + 60
    while not (tmp_path / "rendezvous").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.kill()
    process.join()
    psutil.wait_procs([rank], timeout=60)
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    assert [path.name for path in tmp_path.iterdir()] == ["rendezvous"]
