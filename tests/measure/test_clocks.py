"""Clocks of steps and phases, on a clock that the tests move."""

import time
from types import SimpleNamespace

import pytest
import torch

from tests.other_process import finished, other_process
from vitsweep.training import timed_steps as clocks
from vitsweep.training.timed_steps import PHASES, PhaseClock, StepClock

CPU = torch.device("cpu")


class FakeTime:
    """A monotonic clock in seconds that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    module = SimpleNamespace(perf_counter=fake.perf_counter)
    monkeypatch.setattr(clocks, "time", module)
    return fake


def test_a_step_lasts_from_one_mark_to_the_next(clock: FakeTime) -> None:
    steps = StepClock(CPU)
    for seconds in (0.0, 0.010, 0.250, 0.0):
        clock.now += seconds
        steps.mark()
    clock.now += 5.0  # what comes after the last mark belongs to no step
    assert steps.times_ms() == pytest.approx([10.0, 250.0, 0.0])


def test_without_two_marks_there_is_no_step(clock: FakeTime) -> None:
    steps = StepClock(CPU)
    assert steps.times_ms() == []
    steps.mark()
    assert steps.times_ms() == []


def test_reading_the_times_does_not_end_the_clock(clock: FakeTime) -> None:
    steps = StepClock(CPU)
    for _ in range(2):
        steps.mark()
        clock.now += 1.0
    assert steps.times_ms() == steps.times_ms() == [1000.0]
    steps.mark()
    assert len(steps.times_ms()) == 2


def one_step(clock: FakeTime, phase_clock: PhaseClock, *durations: tuple[str, float]) -> None:
    phase_clock.begin_step()
    for phase, seconds in durations:
        clock.now += seconds
        phase_clock.end(phase)


def test_the_phases_of_a_step_add_up_to_the_step(clock: FakeTime) -> None:
    phase_clock, begin = PhaseClock(CPU), clock.now
    durations = [("data", 0.001), ("forward", 0.020), ("backward", 0.040), ("optimizer", 0.005)]
    one_step(clock, phase_clock, *durations)
    found = phase_clock.median_step_ms()
    assert found == pytest.approx({"data": 1, "forward": 20, "backward": 40, "optimizer": 5})
    assert sum(found.values()) == pytest.approx((clock.now - begin) * 1e3)


def test_micro_batches_add_to_the_same_phases(clock: FakeTime) -> None:
    phase_clock = PhaseClock(CPU)
    parts = [("data", 0.001), ("forward", 0.002), ("backward", 0.003)]
    one_step(clock, phase_clock, *parts, *parts, ("optimizer", 0.004))
    assert phase_clock.median_step_ms() == pytest.approx(
        {"data": 2, "forward": 4, "backward": 6, "optimizer": 4}
    )


def test_phases_are_those_of_the_median_step_and_time_between_steps_is_in_none(
    clock: FakeTime,
) -> None:
    phase_clock = PhaseClock(CPU)
    for forward, optimizer in ((7.0, 7.0), (0.001, 0.006), (0.005, 0.001), (0.002, 9.0)):
        one_step(clock, phase_clock, ("forward", forward), ("optimizer", optimizer))
        clock.now += 100.0
    found = phase_clock.median_step_ms(dropped=1)
    assert set(found) == set(PHASES)
    assert found == pytest.approx({"data": 0, "forward": 1, "backward": 0, "optimizer": 6})
    # of an even number: the mean of the two in the middle
    even = phase_clock.median_step_ms()
    assert even == pytest.approx({"data": 0, "forward": 1.5, "backward": 0, "optimizer": 4503})


def test_without_instrumented_steps_there_are_no_phases() -> None:
    assert PhaseClock(CPU).median_step_ms() == {}


def test_no_process_is_older_than_the_time_since_it_was_started() -> None:
    """By psutil it is, by up to a second: the start of the machine that Linux says has whole seconds."""
    begin = time.monotonic()
    code = "from vitsweep.measure.environment import seconds_since_start as s; print(s())"
    age = float(finished(other_process(code)))
    assert 0 < age < time.monotonic() - begin + 0.02, "Linux counts starts in hundredths"
