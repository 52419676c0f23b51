"""Random faults on a sweep of this machine, then the same command: one row per cell, nothing lost."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.command import Command
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, Status

NUM_CELLS = 8
SECONDS = 40.0
ASKED = ("-m", f"seed=range(0,{NUM_CELLS})", "sweep.baseline=null")
DONE = "Everything that was asked for is measured already"
MOST_COMMANDS = 5


class Faults:
    """Faults that strike the processes of one command."""

    def __init__(self, vitsweep: Command, seed: int) -> None:
        self.vitsweep, self.dice = vitsweep, random.Random(seed)
        self.running = vitsweep.start(*ASKED)
        self.struck: Counter[str] = Counter()

    def strike(self) -> None:
        name = self.dice.choice(["rank", "fork server", "command", "interrupt", "stop", "reader"])
        if name in ("command", "interrupt"):
            self.running.send_signal(signal.SIGKILL if name == "command" else signal.SIGINT)
        elif name == "reader":
            assert self.vitsweep("status", quick=False).returncode in (0, 2, 3)
        elif found := self._ranks() if name in ("rank", "stop") else self._fork_servers():
            chosen = self.dice.choice(found)
            chosen.send_signal(signal.SIGSTOP if name == "stop" else signal.SIGKILL)
            if name == "stop":
                time.sleep(3)
                chosen.send_signal(signal.SIGCONT)
        self.struck[name] += 1

    def start_again_if_ended(self) -> None:
        if self.running.poll() is not None:
            self.running.communicate()
            self.running = self.vitsweep.start(*ASKED)

    def _fork_servers(self) -> list[psutil.Process]:
        if self.running.poll() is not None:
            return []
        children = psutil.Process(self.running.pid).children()
        return [p for p in children if "multiprocessing.forkserver" in " ".join(p.cmdline())]

    def _ranks(self) -> list[psutil.Process]:
        return [rank for server in self._fork_servers() for rank in server.children()]


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_random_faults_lose_nothing_and_double_nothing(vitsweep: Command, seed: int) -> None:
    faults = Faults(vitsweep, seed)
    records: dict[Path, bytes] = {}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(faults.dice.uniform(1, 4))
        try:
            faults.strike()
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue  # it had just ended
        records |= {p: p.read_bytes() for p in vitsweep.store.cells.glob("*/runs/*.json")}
        faults.start_again_if_ended()
    faults.running.communicate(timeout=300)

    for _ in range(MOST_COMMANDS):
        last = vitsweep(*ASKED)
        if DONE in last.stdout:
            break
        vitsweep("retry", "--status", "failed,killed,timed_out,preempted", quick=False)
    assert DONE in last.stdout, (faults.struck, last.stdout, last.stderr)
    assert all(path.read_bytes() == text for path, text in records.items())
    runs = vitsweep.runs()
    assert set(runs["status"]) <= {Status.measured, *STOPPED_FROM_OUTSIDE}, runs["reason"].tolist()
    assert runs[runs["status"] == Status.measured].groupby("cell_id").size().tolist() == (
        [1] * NUM_CELLS
    )
    assert vitsweep.cells()["status"].tolist() == [Status.measured] * NUM_CELLS
    deadline = time.monotonic() + 60
    while left := [p for p in psutil.process_iter() if _is_in(p, vitsweep.folder)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def _is_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.pid != os.getpid() and Path(process.cwd()) == folder
    except psutil.Error:
        return False
