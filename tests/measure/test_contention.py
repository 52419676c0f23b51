"""Who else used the machine: only what happened while the steps were timed counts."""

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

environment.STOPPED_S = 1.0
early, seconds = environment.StopMonitor(), 2.0
pid = environment.psutil.Process().pid
other = f"import os, signal, time; time.sleep(0.5); os.kill({pid}, signal.SIGSTOP); "
other += f"time.sleep({seconds}); os.kill({pid}, signal.SIGCONT)"
begin = time.perf_counter()
subprocess.run([sys.executable, "-c", other], check=True)
time.sleep(2 * environment.TICK_S)
late = environment.StopMonitor()
time.sleep(2.0)  # as a rank that waits for another
busy = time.process_time() + 1.0
while time.process_time() < busy:
    pass
print(early.end(begin), late.end(begin), environment.StopMonitor().end(time.perf_counter()))
"""


def test_a_process_that_was_stopped_is_told_from_one_that_waits_or_works() -> None:
    stopped, waited, ended = map(float, finished(other_process(WATCHED)).split())
    assert stopped > 1.0
    assert waited == ended == 0.0


def test_a_run_with_a_stopped_rank_is_preempted_so_that_it_is_repeated() -> None:
    status, reason = classify(StoppedError("Rank 1 was stopped for 15 s of the timed window."))
    assert status in STOPPED_FROM_OUTSIDE
    assert "15 s" in reason
