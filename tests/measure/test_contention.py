"""Who else used the machine: only what happened while the steps were timed counts."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from tests.other_process import finished, other_process
from vitsweep.cell import StoppedError
from vitsweep.execution.outcome import classify
from vitsweep.measure import environment as monitor
from vitsweep.measure.environment import SHARED_CORES_SHARE, ContentionMonitor
from vitsweep.results.record import STOPPED_FROM_OUTSIDE

CPU = torch.device("cpu")


class Times(NamedTuple):
    """CPU seconds of a machine since it was started."""

    user: float
    system: float
    idle: float
    iowait: float


class Machine:
    """A machine of two cores that works as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times, self.own = Times(100.0, 10.0, 1000.0, 5.0), 7.0
        monkeypatch.setattr(psutil, "cpu_times", lambda: self.times)
        monkeypatch.setattr(monitor, "own_seconds", lambda: {1: self.own})

    def work(self, own: float = 0.0, of_others: float = 0.0, idle: float = 0.0) -> None:
        self.own += own
        user, system, rest, waiting = self.times
        self.times = Times(user + own + of_others, system, rest + idle / 2, waiting + idle / 2)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_ranks_alone_share_nothing(machine: Machine) -> None:
    contention = ContentionMonitor(CPU)
    machine.work(own=10.0, idle=2.0)
    assert contention.end() == 10.0
    assert not contention.shared(10.0)


def test_all_ranks_of_the_node_are_its_own(machine: Machine) -> None:
    contention = ContentionMonitor(CPU)
    machine.work(own=5.0, of_others=5.0)
    own = contention.end()
    assert contention.shared(own)
    assert not contention.shared(own + 5.0), "the other rank's time"


@pytest.mark.parametrize(("of_others", "shared"), [(14.0, False), (16.0, True)])
def test_others_may_take_a_small_share_of_all_cores(
    of_others: float, shared: bool, machine: Machine
) -> None:
    assert SHARED_CORES_SHARE == 0.15
    contention = ContentionMonitor(CPU)
    machine.work(own=50.0, of_others=of_others, idle=50.0 - of_others)
    assert contention.shared(contention.end()) is shared


def test_what_comes_after_the_window_does_not_count(machine: Machine) -> None:
    """A rank goes on with instrumented steps, the profiler, perhaps epochs of training."""
    contention = ContentionMonitor(CPU)
    machine.work(own=10.0)
    own = contention.end()
    machine.work(own=500.0, of_others=500.0)
    assert not contention.shared(own)


def test_a_window_too_short_to_see_is_not_shared(machine: Machine) -> None:
    contention = ContentionMonitor(CPU)
    assert not contention.shared(contention.end())


def test_this_process_spends_time_of_its_own() -> None:
    before = sum(monitor.own_seconds().values())
    total: Any = 0
    while sum(monitor.own_seconds().values()) == before:
        total += sum(range(10_000))
    assert sum(monitor.own_seconds().values()) > before


WATCHED = """
import subprocess, sys, time
from vitsweep.measure import environment

environment.STOPPED_S, environment.TICK_S = 0.5, 0.02
watching = environment.StopMonitor()
pid = environment.psutil.Process().pid
other = f"import os, signal, time; os.kill({pid}, signal.SIGSTOP); "
other += f"time.sleep(1.0); os.kill({pid}, signal.SIGCONT)"
begin = time.perf_counter()
subprocess.run([sys.executable, "-c", other], check=True)
while not watching._stops and time.perf_counter() < begin + 60:
    time.sleep(0.02)
print(watching.end(begin))
"""


def test_a_process_that_was_stopped_is_seen() -> None:
    assert float(finished(other_process(WATCHED))) > 0.5


def test_a_process_that_waits_or_works_was_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread wakes late where the processors are crowded, and has used some of them."""
    late, now, used = monitor.TICK_S + 10.0, 100.0, 5.0
    slept: list[tuple[float, float]] = [(monitor.TICK_S, 0.0), (late, 1.0), (late, 0.1)]
    times = {"perf_counter": lambda: now, "process_time": lambda: used}
    monkeypatch.setattr(monitor, "time", SimpleNamespace(**times))

    def wait(seconds: float) -> bool:
        nonlocal now, used
        if slept:
            now, used = now + slept[0][0], used + slept[0][1]
        return not slept or not slept.pop(0)

    watching = object.__new__(monitor.StopMonitor)
    watching._end, watching._stops = SimpleNamespace(wait=wait, set=lambda: None), []
    watching._thread = SimpleNamespace(join=lambda: None)
    watching._run()
    assert watching.end(0.0) == pytest.approx(10.0), "the last, which used too little"
    assert watching.end(now - 4.0) == pytest.approx(4.0)
    assert watching.end(now) == 0


def test_a_run_with_a_stopped_rank_is_preempted_so_that_it_is_repeated() -> None:
    status, reason = classify(StoppedError("Rank 1 was stopped for 15 s of the timed window."))
    assert status in STOPPED_FROM_OUTSIDE
    assert "15 s" in reason
