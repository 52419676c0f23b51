"""Who else used the machine: only what happened while the steps were timed counts."""

from typing import Any, NamedTuple

import psutil
import pytest
import torch

from vitsweep.measure import others
from vitsweep.measure.others import SHARED_CORES_SHARE, Neighbours, throttled

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
        monkeypatch.setattr(others, "_own_seconds", lambda: self.own)

    def work(self, own: float = 0.0, of_others: float = 0.0, idle: float = 0.0) -> None:
        self.own += own
        user, system, rest, waiting = self.times
        self.times = Times(user + own + of_others, system, rest + idle / 2, waiting + idle / 2)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_ranks_alone_share_nothing(machine: Machine) -> None:
    neighbours = Neighbours(CPU)
    machine.work(own=10.0, idle=2.0)
    assert neighbours.end() == 10.0
    assert not neighbours.shared(10.0)


def test_all_ranks_of_the_node_are_its_own(machine: Machine) -> None:
    neighbours = Neighbours(CPU)
    machine.work(own=5.0, of_others=5.0)
    own = neighbours.end()
    assert neighbours.shared(own)
    assert not neighbours.shared(own + 5.0), "the other rank's time"


@pytest.mark.parametrize(("of_others", "shared"), [(14.0, False), (16.0, True)])
def test_others_may_take_a_small_share_of_all_cores(
    of_others: float, shared: bool, machine: Machine
) -> None:
    assert SHARED_CORES_SHARE == 0.15
    neighbours = Neighbours(CPU)
    machine.work(own=50.0, of_others=of_others, idle=50.0 - of_others)
    assert neighbours.shared(neighbours.end()) is shared


def test_what_comes_after_the_window_does_not_count(machine: Machine) -> None:
    """A rank goes on with instrumented steps, the profiler, perhaps epochs of training."""
    neighbours = Neighbours(CPU)
    machine.work(own=10.0)
    own = neighbours.end()
    machine.work(own=500.0, of_others=500.0)
    assert not neighbours.shared(own)


def test_a_window_too_short_to_see_is_not_shared(machine: Machine) -> None:
    neighbours = Neighbours(CPU)
    assert not neighbours.shared(neighbours.end())


def test_this_process_spends_time_of_its_own() -> None:
    before = others._own_seconds()
    total: Any = 0
    while others._own_seconds() == before:
        total += sum(range(10_000))
    assert others._own_seconds() > before


def test_whether_a_cpu_is_slowed_by_heat_is_unknown() -> None:
    assert throttled(CPU) is None
