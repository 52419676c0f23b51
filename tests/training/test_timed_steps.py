"""How long is timed: steps and seconds, after a warm-up that empties the loader's queue."""

import gc
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cells import cell
from tests.choices import choice
from vitsweep.spec.measurement import Measurement
from vitsweep.training import timed_steps as module
from vitsweep.training.timed_steps import GROWTH, TimedSteps, timed_steps


@dataclass
class Machine:
    """A clock in seconds, a loader and a trainer that move it on."""

    step_seconds: list[float]
    wait_seconds: float = 0.0
    now: float = 0.0
    done: int = 0
    skipped: list[bool] = field(default_factory=list)
    world: Any = field(default_factory=lambda: SimpleNamespace(device=torch.device("cpu")))
    cell: Any = field(default_factory=lambda: SimpleNamespace(runtime=choice("runtime", "plain")))

    def perf_counter(self) -> float:
        return self.now

    def __next__(self) -> None:
        self.now += self.wait_seconds

    def step(self, stream: Any) -> torch.Tensor:
        next(stream)
        self.now += self.step_seconds[min(self.done, len(self.step_seconds) - 1)]
        self.done += 1
        return torch.tensor(float(self.done))


def timed(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, prefetched: int = 0, **given: float
) -> TimedSteps:
    for place in (module,):
        monkeypatch.setattr(place, "time", machine)
    plain = cell("measurement=smoke").measurement
    known = {"warmup_steps": 2, "warmup_min_seconds": 0.0, "measured_steps": 4, "min_seconds": 0.0}
    fields = vars(plain) | known | given
    return timed_steps(machine, machine, Measurement(**fields), prefetched)  # type: ignore[arg-type]


def test_what_a_quota_held_back_is_that_of_the_window(monkeypatch) -> None:
    machine = Machine([0.5])
    monkeypatch.setattr(module, "throttled_seconds", lambda: 0.1 * machine.done)
    assert timed(monkeypatch, machine).throttled_seconds == pytest.approx(0.4), "of 4 of 6 steps"
    monkeypatch.setattr(module, "throttled_seconds", lambda: None)
    assert timed(monkeypatch, machine).throttled_seconds is None


def test_without_seconds_the_steps_that_were_asked_for_are_taken(monkeypatch) -> None:
    machine = Machine([0.5], wait_seconds=0.25)
    found = timed(monkeypatch, machine)
    elapsed_s = machine.now - found.window_start
    assert elapsed_s == pytest.approx(sum(found.times_ms[found.warmup_steps :]) / 1e3)
    assert found.times_ms == pytest.approx([750.0] * 6)
    assert found.data_waits_ms == pytest.approx([250.0] * 6)
    assert found.warmup_steps == 2
    assert [float(loss) for loss in found.losses] == [1, 2, 3, 4, 5, 6]


def test_python_collects_no_garbage_within_the_steps_and_goes_on_afterwards(monkeypatch) -> None:
    enabled = []

    class Watched(Machine):
        def step(self, stream: Any) -> torch.Tensor:
            enabled.append(gc.isenabled())
            return super().step(stream)

    timed(monkeypatch, Watched([0.5]))
    assert enabled == [False] * 6
    assert gc.isenabled()


def test_steps_are_added_until_the_window_is_long_enough(monkeypatch) -> None:
    found = timed(monkeypatch, Machine([0.125]), min_seconds=5.0)
    window = found.times_ms[found.warmup_steps :]
    assert found.warmup_steps == 2
    assert sum(window) >= 5000
    assert len(window) == 44, "5 s and a tenth more, in steps of 125 ms"


def test_a_window_that_is_long_enough_by_its_steps_gets_no_more(monkeypatch) -> None:
    assert len(timed(monkeypatch, Machine([2.0]), min_seconds=5.0).times_ms) == 2 + 4


def test_warm_up_lasts_its_seconds_too(monkeypatch) -> None:
    found = timed(monkeypatch, Machine([0.25]), warmup_min_seconds=3.0)
    assert found.warmup_steps == 12
    assert len(found.times_ms) == 16


def test_warm_up_goes_on_while_steps_become_faster(monkeypatch) -> None:
    falling = [0.5 * 0.9**n for n in range(20)]  # steady from step 20 on
    nine = {"warmup_steps": 9, "warmup_min_seconds": 1.0}
    found = timed(monkeypatch, Machine([*falling, 0.06]), **nine)
    assert found.warmup_steps >= 20
    assert found.warmup_steps_added == found.warmup_steps - 9
    assert found.times_ms[found.warmup_steps :] == pytest.approx([60.0] * 4)


def test_warm_up_ends_although_steps_become_faster_and_faster(monkeypatch) -> None:
    machine = Machine([0.5 * 0.9**n for n in range(500)])
    found = timed(monkeypatch, machine, warmup_steps=9, warmup_min_seconds=1.0)
    assert found.warmup_steps_added == 3 + 4 + 5 + 7, "a third more each time"


def test_a_stall_during_the_warm_up_does_not_lengthen_it(monkeypatch) -> None:
    machine = Machine([0.25, 0.25, 0.25, 0.25, 4.0, 0.25])
    found = timed(monkeypatch, machine, warmup_steps=9, warmup_min_seconds=1.0)
    assert found.warmup_steps == 9
    assert found.warmup_steps_added == 0


def test_without_seconds_warm_up_has_its_steps_only(monkeypatch) -> None:
    machine = Machine([0.5 * 0.9**n for n in range(500)])
    assert timed(monkeypatch, machine, warmup_steps=12).warmup_steps == 12


def test_warm_up_uses_up_what_the_loader_holds_ready(monkeypatch) -> None:
    machine = Machine([0.1] * 8 + [1.0])  # eight batches were ready, then each takes a second
    found = timed(monkeypatch, machine, prefetched=8)
    assert found.warmup_steps == 8
    assert found.times_ms[8:] == pytest.approx([1000.0] * 4)


def test_fast_steps_are_measured_for_the_whole_time(monkeypatch) -> None:
    found = timed(monkeypatch, Machine([0.001]), min_seconds=5.0)
    assert sum(found.times_ms[found.warmup_steps :]) >= 5000


def test_a_window_that_was_too_short_becomes_warm_up_of_a_longer_one(monkeypatch) -> None:
    machine = Machine([1.0] * 2 + [0.125])  # steps become eight times faster after the estimate
    found = timed(monkeypatch, machine, min_seconds=5.0)
    window = found.times_ms[found.warmup_steps :]
    assert found.warmup_steps > 2
    assert sum(window) >= 5000


def test_steps_that_become_ever_faster_end_all_the_same(monkeypatch) -> None:
    machine = Machine([0.5**n for n in range(12)])
    found = timed(monkeypatch, machine, min_seconds=60.0)
    window = found.times_ms[found.warmup_steps :]
    assert 0 < len(window) <= GROWTH * found.warmup_steps


def test_without_warm_up_the_first_window_gives_the_estimate(monkeypatch) -> None:
    found = timed(monkeypatch, Machine([0.25]), warmup_steps=0, min_seconds=3.0)
    assert sum(found.times_ms[found.warmup_steps :]) >= 3000


def test_python_may_collect_garbage_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enabled: list[bool] = []

    class Watched(Machine):
        def step(self, stream: Any) -> torch.Tensor:
            enabled.append(gc.isenabled())
            return super().step(stream)

    for name in ("gc_automatic", "gc_scheduled", "plain"):
        cell = SimpleNamespace(runtime=choice("runtime", name))
        timed(monkeypatch, Watched([0.1], cell=cell), measured_steps=1)
    assert enabled[0]
    assert not enabled[-1]
    assert set(enabled) == {True, False}


def test_slow_steps_are_cut_short_but_two_are_timed_after_one_of_warm_up(monkeypatch) -> None:
    found = timed(
        monkeypatch, Machine([9.0]), max_seconds=5.0, warmup_min_seconds=3.0, min_seconds=4.0
    )
    assert (found.warmup_steps, len(found.times_ms)) == (1, 3)
    assert found.cut_short
    assert found.over_time


def test_of_steps_that_are_far_too_slow_one_is_timed(monkeypatch) -> None:
    found = timed(monkeypatch, Machine([30.0]), max_seconds=5.0)
    assert (found.warmup_steps, len(found.times_ms)) == (1, 2)


def test_warm_up_and_window_end_by_time(monkeypatch) -> None:
    given = {"warmup_steps": 20, "measured_steps": 100, "max_seconds": 5.0}
    found = timed(monkeypatch, Machine([0.5]), **given)
    assert (found.warmup_steps, len(found.times_ms)) == (10, 20)
    assert found.cut_short
    assert not found.over_time
    assert not timed(monkeypatch, Machine([0.01]), **given).cut_short


def test_a_slow_first_step_does_not_cut_the_window_short(monkeypatch) -> None:
    found = timed(monkeypatch, Machine([60.0, 0.5]), max_seconds=5.0, measured_steps=8)
    assert len(found.times_ms) - found.warmup_steps == 8
    assert not found.cut_short


def test_a_window_that_is_cut_short_holds_two_updates(monkeypatch) -> None:
    class Overflowing(Machine):
        def step(self, stream: Any) -> torch.Tensor:
            self.skipped.append(self.done < 4)
            return super().step(stream)

    found = timed(monkeypatch, machine := Overflowing([9.0]), max_seconds=5.0)
    assert machine.skipped[found.warmup_steps :] == [False] * 2


def test_what_a_loader_prefetches_stays_out_of_a_short_window(monkeypatch) -> None:
    assert timed(monkeypatch, Machine([9.0]), prefetched=3, max_seconds=5.0).warmup_steps == 3


ALONE: Any = SimpleNamespace(world=SimpleNamespace(device=torch.device("cpu")), skipped=[])


def test_steps_are_estimated_from_the_latter_half_of_those_so_far() -> None:
    """Of seven steps the last four count: 250 ms on average."""
    samples = TimedSteps(times_ms=[9000.0, 9000.0, 9000.0, 100.0, 200.0, 300.0, 400.0])
    assert module._seconds_per_step(samples, ALONE) == 0.25
    assert [module._steps_in(s, samples, ALONE) for s in (0.0, 0.25, 0.26, 5.0)] == [1, 1, 2, 20]
    assert [module._steps_in(s, samples, ALONE) for s in (174.9, 1e6)] == [700, 700], "100 for each"
    assert module._steps_in(5.0, TimedSteps(), ALONE) == 1
    assert [module._most_steps(s, samples, ALONE) for s in (-1.0, 0.24, 0.25, 0.74)] == [0, 0, 1, 2]
    for seconds, most in ((0.04, 1), (0.05, 2), (0.5, 2), (0.75, 3), (5.0, 20)):
        assert module._steps_of_window(seconds, samples, ALONE) == most
    assert module._seconds_per_step(TimedSteps(times_ms=[0.0]), ALONE) == 1e-9


def test_a_warm_up_goes_on_where_its_last_third_is_five_hundredths_faster(monkeypatch) -> None:
    taken: list[int] = []

    def take(steps: int, trainer: Any, stream: Any, samples: TimedSteps) -> None:
        taken.append(steps)
        samples.times_ms += [80.0] * steps

    monkeypatch.setattr(module, "_take", take)
    for times, added in (
        ([100.0] * 6 + [95.0] * 3, 0),
        ([100.0] * 6 + [94.9] * 3, 3 + 4 + 5),
        ([900.0] * 3 + [100.0] * 3 + [94.9, 94.9, 900.0], 3 + 4 + 5),
        ([100.0] * 6 + [80.0] * 2, 0),
    ):
        samples = TimedSteps(times_ms=[*times])
        module._extend_warmup(ALONE, None, samples)  # type: ignore[arg-type]
        assert samples.warmup_steps_added == added == len(samples.times_ms) - len(times), times


def test_a_window_is_long_enough_by_its_seconds_or_by_half_of_the_most() -> None:
    plain = vars(cell("measurement=smoke").measurement)

    def found(
        times: list[float], *, cut: bool = False, skipped: int = 0, **given: float
    ) -> tuple[bool, bool]:
        samples = TimedSteps(times_ms=[900.0, *times], warmup_steps=1, cut_short=cut)
        trainer: Any = SimpleNamespace(world=ALONE.world, skipped=[1, *([1] * skipped), 0, 0])
        known = {"min_seconds": 2.0, "max_seconds": 3.0, "measured_steps": 2}
        asked = Measurement(**(plain | known))
        is_enough = module._is_long_enough(samples, asked, trainer)
        return is_enough, samples.over_time

    assert found([1000.0, 1000.0]) == (True, False)
    assert found([1000.0, 999.0]) == (False, False)
    assert found([1000.0, 500.0], cut=True) == (True, False), "half of 3 s"
    assert found([1000.0, 499.0], cut=True) == (False, False)
    assert found([3000.0, 3000.0], cut=True) == (True, False)
    assert found([3000.0, 3001.0], cut=True) == (True, True)
    assert found([3000.0, 3001.0]) == (True, False)
    assert found([1000.0, 1000.0, 1000.0], cut=True, skipped=1) == (True, False)
    assert found([1000.0, 1000.0, 1000.0], cut=True, skipped=2) == (False, False)
    assert found([2000.0], cut=True) == (True, False)
    assert found([2000.0], cut=True, skipped=1) == (False, False)


def test_the_median_step_is_the_one_in_the_middle_or_the_mean_of_two() -> None:
    phases = module.PhaseClock(torch.device("cpu"))
    phases._steps = [
        {"data": 9.0, "forward": 9.0},
        {"data": 1.0},
        {"data": 3.0, "bubble": 1.0},
        {"data": 2.0},
    ]
    rest = {"backward": 0.0, "optimizer": 0.0}
    assert phases.median_step_ms(dropped=1) == {"data": 2.0, "forward": 0.0, "bubble": 0.0} | rest
    found = phases.median_step_ms()
    assert found == {"data": 2.5, "forward": 0.0, "bubble": 0.5} | rest
    assert phases.median_step_ms(dropped=4) == {}
    phases._steps = [{"data": 1.0}]
    assert phases.median_step_ms() == {"data": 1.0, "forward": 0.0} | rest
