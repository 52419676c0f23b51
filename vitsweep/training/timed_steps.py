"""Training steps that are timed: undisturbed ones, and ones with a clock between the phases."""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from vitsweep.measure.clocks import PhaseClock, StepClock
from vitsweep.spec.data import Batches
from vitsweep.spec.measurement import Measurement
from vitsweep.training.garbage import garbage_collector_off
from vitsweep.training.trainer import MicroBatch, Trainer

MARGIN = 1.1
"""More steps than the estimate asks for: a window that is too short must be repeated."""
GROWTH = 100
"""An estimate from n steps is trusted for 100 n steps: the next, longer window corrects it."""
FALLING = 0.05
"""Steps still become faster where the last third of the warm-up is faster than the one before by this."""
FEWEST_STEPS = 9
"""With fewer steps of warm-up its thirds say nothing: a stall would decide."""
EXTENSIONS = 4
"""So often at most the warm-up is extended, each time by a third."""
ATTEMPTS = 4
"""Windows at most: steps may become faster and faster while a machine or a cache warms up."""


@dataclass(kw_only=True)
class TimedSteps:
    """Undisturbed steps of one rank, warm-up included.

    Attributes:
        times_ms: by step.
        data_waits_ms: by step, time in which the host waited for micro-batches.
        losses: by step, mean loss of the rank's images, still on the device.
        warmup_steps: steps before the timed window; the same on every rank.
        warmup_steps_added: how many of them because steps were still becoming faster.
        window_start: time of `time.perf_counter` at which the window began, in seconds.
    """

    times_ms: list[float] = field(default_factory=list)
    data_waits_ms: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    warmup_steps: int = 0
    warmup_steps_added: int = 0
    window_start: float = 0.0


def endless(batches: Batches, from_epoch: int = 0) -> Iterator[MicroBatch]:
    """Yield micro-batches, epoch after epoch."""
    epoch = from_epoch
    while True:
        yield from batches.train(epoch)
        epoch += 1


def timed_steps(
    trainer: Trainer,
    stream: Iterator[MicroBatch],
    measurement: Measurement,
    prefetched_steps: int = 0,
) -> TimedSteps:
    """Warm up, then train through a window of `measured_steps` steps and `min_seconds` seconds.

    Warm-up takes `warmup_steps` steps and `warmup_min_seconds`, and at least as many steps as the
    loader holds ready: the window begins when batches come as fast as the loader makes them. It goes on
    while steps become faster, a bounded number of times, where `warmup_min_seconds` is above 0. The
    number of steps of the window is set before it, from the slowest rank's steps so far, so that
    nothing synchronises the ranks within the window. If the window proves to be shorter than
    `min_seconds` after all, it counts as warm-up, and a longer one follows.

    Args:
        trainer: of this rank; every rank calls this function.
        stream: micro-batches.
        measurement: number of steps and seconds.
        prefetched_steps: steps that the loader's queue is enough for.
    """
    if trainer.cell.runtime.collects_garbage == "automatic":
        return _timed_steps(trainer, stream, measurement, prefetched_steps)
    # A collection of Python's own takes milliseconds, at any time: none may fall into a timed step.
    with garbage_collector_off():
        return _timed_steps(trainer, stream, measurement, prefetched_steps)


def _timed_steps(
    trainer: Trainer, stream: Iterator[MicroBatch], measurement: Measurement, prefetched_steps: int
) -> TimedSteps:
    samples = TimedSteps()
    _take(max(measurement.warmup_steps, prefetched_steps), trainer, stream, samples)
    missing = measurement.warmup_min_seconds - _slowest_seconds(samples.times_ms, trainer)
    if measurement.warmup_min_seconds and missing > 0:
        _take(_steps_in(missing, samples, trainer), trainer, stream, samples)
    if measurement.warmup_min_seconds:
        _extend_warmup(trainer, stream, samples)
    for _ in range(ATTEMPTS):
        samples.warmup_steps = len(samples.times_ms)
        steps = measurement.measured_steps
        if measurement.min_seconds:
            steps = max(steps, _steps_in(MARGIN * measurement.min_seconds, samples, trainer))
        samples.window_start = time.perf_counter()
        _take(steps, trainer, stream, samples)
        window = samples.times_ms[samples.warmup_steps :]
        if not measurement.min_seconds or (
            _slowest_seconds(window, trainer) >= measurement.min_seconds
        ):
            break
    return samples


def _extend_warmup(trainer: Trainer, stream: Iterator[MicroBatch], samples: TimedSteps) -> None:
    """Take more steps while the median of the last third is below the one before; all ranks agree.

    Medians, so that a stall of the loader neither lengthens nor ends the warm-up: a rule that ends it
    after a stall would keep stalls out of the window.
    """
    for _ in range(EXTENSIONS):
        third = len(samples.times_ms) // 3
        before, last = samples.times_ms[-2 * third : -third], samples.times_ms[-third:]
        if len(samples.times_ms) < FEWEST_STEPS or (
            _of_slowest_rank(statistics.median(last), trainer)
            >= (1 - FALLING) * _of_slowest_rank(statistics.median(before), trainer)
        ):
            return
        _take(third, trainer, stream, samples)
        samples.warmup_steps_added += third


def _take(steps: int, trainer: Trainer, stream: Iterator[MicroBatch], samples: TimedSteps) -> None:
    """Train for some steps; nothing but the step lies between two marks, and no loss is read."""
    clock, waiting = StepClock(trainer.world.device), _WaitClock(stream)
    clock.mark()
    for _ in range(steps):
        samples.losses.append(trainer.step(waiting))
        clock.mark()
        samples.data_waits_ms.append(waiting.take_ms())
    samples.times_ms += clock.times_ms()


def _steps_in(seconds: float, samples: TimedSteps, trainer: Trainer) -> int:
    """Estimate how many steps last `seconds`, from the latter half of the steps so far.

    All ranks get the same number. Without a step so far it is 1.
    """
    times = samples.times_ms
    latter = times[len(times) // 2 :]
    if not latter:
        return 1
    seconds_per_step = _slowest_seconds(latter, trainer) / len(latter)
    needed = math.ceil(seconds / max(seconds_per_step, 1e-9))
    return min(max(1, needed), GROWTH * len(times))


def _slowest_seconds(times_ms: list[float], trainer: Trainer) -> float:
    """Return the largest sum of step times over all ranks, in seconds."""
    return _of_slowest_rank(sum(times_ms) / 1e3, trainer)


def _of_slowest_rank(value: float, trainer: Trainer) -> float:
    """Return the largest value over all ranks; every rank calls this."""
    largest = torch.tensor(value, dtype=torch.float64, device=trainer.world.device)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


class _WaitClock:
    """An iterator that adds up how long the host waits for the next micro-batch."""

    def __init__(self, stream: Iterator[MicroBatch]) -> None:
        self._stream, self._seconds = stream, 0.0

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        begin = time.perf_counter()
        try:
            return next(self._stream)
        finally:
            self._seconds += time.perf_counter() - begin

    def take_ms(self) -> float:
        """Return the milliseconds since the last call."""
        spent, self._seconds = self._seconds, 0.0
        return spent * 1e3


def instrumented_steps(
    trainer: Trainer, stream: Iterator[MicroBatch], steps: int
) -> dict[str, float]:
    """Train for some steps with a device synchronisation at the end of each phase.

    Returns:
        Phase -> median over the steps in milliseconds; empty where a step is replayed as a whole.
    """
    if trainer.captured:
        return {}
    clock = PhaseClock(trainer.world.device)
    for _ in range(steps):
        clock.begin_step()
        trainer.step(stream, clock)
    return clock.medians_ms()
