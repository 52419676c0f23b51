"""Training steps that are timed: undisturbed ones, and ones with a clock between the phases."""

import gc
import itertools
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from vitsweep.control_group import throttled_seconds
from vitsweep.spec.data import Batches
from vitsweep.spec.measurement import Measurement
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
LEAST_STEPS = 2
"""Of a window that `max_seconds` cuts short; its warm-up has one at least."""
FAR_TOO_SLOW = 5
"""Where a step lasts this many times `max_seconds`, the window has one."""
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
        cut_short: whether `max_seconds` left steps of the window out; the same on every rank.
        over_time: whether even one step lasts longer; the same on every rank.
        window_start: time of `time.perf_counter` at which the window began, in seconds.
        throttled_seconds: for which a CPU quota held this rank's control group back in the window, summed
            over cores; None where unknown.
    """

    times_ms: list[float] = field(default_factory=list)
    data_waits_ms: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    warmup_steps: int = 0
    warmup_steps_added: int = 0
    cut_short: bool = False
    over_time: bool = False
    window_start: float = 0.0
    throttled_seconds: float | None = None


def endless(batches: Batches) -> Iterator[MicroBatch]:
    """Yield micro-batches, epoch after epoch."""
    return itertools.chain.from_iterable(map(batches.train, itertools.count()))


def timed_steps(
    trainer: Trainer,
    stream: Iterator[MicroBatch],
    measurement: Measurement,
    prefetched_steps: int = 0,
) -> TimedSteps:
    """Warm up, then train through a window of `least_steps` steps and `min_seconds` seconds.

    Neither lasts longer than `max_seconds`, as far as the steps before show, unless
    one step of the warm-up, or two of the window do (one, where a step is far too slow).

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
    samples, longest = TimedSteps(), measurement.max_seconds
    with undisturbed(trainer):
        # what a loader prefetches is warm-up however long that takes
        steps = max(min(1, measurement.warmup_steps), prefetched_steps)
        _take(steps, trainer, stream, samples)
        taken = _slowest_seconds(samples.times_ms, trainer)
        if (rest := measurement.warmup_steps - steps) > 0:
            most = _most_steps(longest - taken, samples, trainer)
            _take(min(rest, most), trainer, stream, samples)
            taken = _slowest_seconds(samples.times_ms, trainer)
        missing = min(measurement.warmup_min_seconds, longest) - taken
        if measurement.warmup_min_seconds and missing > 0:
            _take(_steps_in(missing, samples, trainer), trainer, stream, samples)
        if measurement.warmup_min_seconds and taken < longest:
            _extend_warmup(trainer, stream, samples)
        for _ in range(ATTEMPTS):
            samples.warmup_steps = len(samples.times_ms)
            steps = measurement.measured_steps
            if measurement.min_seconds:
                steps = measurement.least_steps
                steps = max(steps, _steps_in(MARGIN * measurement.min_seconds, samples, trainer))
            most = _steps_of_window(longest, samples, trainer) if samples.times_ms else steps
            samples.cut_short = steps > most
            before = throttled_seconds()
            samples.window_start = time.perf_counter()
            _take(min(steps, most), trainer, stream, samples)
            if before is not None:
                samples.throttled_seconds = (throttled_seconds() or before) - before
            if _is_long_enough(samples, measurement, trainer):
                break
    return samples


def undisturbed(trainer: Trainer) -> AbstractContextManager[None]:
    """Context of timed steps: none of Python's own collections, which take milliseconds, at any time."""
    is_automatic = trainer.cell.runtime.collects_garbage == "automatic"
    return nullcontext() if is_automatic else garbage_collector_off()


def _is_long_enough(samples: TimedSteps, measurement: Measurement, trainer: Trainer) -> bool:
    """Whether a window is as long as it should be, or as `max_seconds` lets it be; all ranks agree."""
    window = samples.times_ms[samples.warmup_steps :]
    wanted, seconds = measurement.min_seconds, _slowest_seconds(window, trainer)
    samples.over_time = samples.cut_short and seconds > len(window) * measurement.max_seconds
    # perhaps by steps that are slow only at first, or whose update is skipped
    if samples.cut_short:
        wanted = measurement.max_seconds / 2
        skipped = sum(bool(flag) for flag in trainer.skipped[samples.warmup_steps :])
        if len(window) - skipped < min(LEAST_STEPS, len(window)):
            return False
    return seconds >= wanted


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
    if not times:
        return 1
    needed = math.ceil(seconds / _seconds_per_step(samples, trainer))
    return min(max(1, needed), GROWTH * len(times))


def _most_steps(seconds: float, samples: TimedSteps, trainer: Trainer) -> int:
    """Return how many whole steps fit into `seconds`; all ranks get the same number."""
    return int(max(seconds, 0.0) / _seconds_per_step(samples, trainer))


def _steps_of_window(seconds: float, samples: TimedSteps, trainer: Trainer) -> int:
    """Return how many steps a window of `seconds` may have; all ranks get the same number."""
    is_far_too_slow = _seconds_per_step(samples, trainer) > FAR_TOO_SLOW * seconds
    return max(1 if is_far_too_slow else LEAST_STEPS, _most_steps(seconds, samples, trainer))


def _seconds_per_step(samples: TimedSteps, trainer: Trainer) -> float:
    """Return the mean of the latter half of the steps so far on the slowest rank."""
    latter = samples.times_ms[len(samples.times_ms) // 2 :]
    return max(_slowest_seconds(latter, trainer) / len(latter), 1e-9)


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

    One step more is taken and dropped: in the first one a rank may wait for another that came late.

    Returns:
        Phase -> milliseconds in the median step; empty without steps.
    """
    if not steps:
        return {}
    clock = PhaseClock(trainer.world.device)
    for _ in range(1 + steps):
        clock.begin_step()
        trainer.step(stream, clock)
    return clock.median_step_ms(dropped=1)


@contextmanager
def garbage_collector_off() -> Iterator[None]:
    """Collect what is garbage now, then let Python collect nothing by itself inside the block.

    What is alive is in the oldest generation then, which `ScheduledCollection` does not look at.
    Objects in reference cycles pile up for as long as the block lasts.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Clocks: the whole step undisturbed, and its phases on separate steps.


PHASES = ("data", "forward", "backward", "optimizer")
BUBBLE = "bubble"
"""Phase between the chunks of a pipeline: waiting for other stages and their activations."""


class StepClock:
    """Marks at step boundaries, read only after the last step.

    On CUDA a mark is an event recorded in the stream: nothing waits, so measuring does not change
    the queue. On CPU it is a monotonic clock. A step lasts from one mark to the next and contains
    the wait for its data; nothing else runs between the marks.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        """Mark the end of a step and the beginning of the next."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter() * 1e3)

    def times_ms(self) -> list[float]:
        """Return the time of every step in milliseconds; waits for the device once."""
        if self._cuda:
            torch.cuda.synchronize()
        pairs = zip(self._marks[:-1], self._marks[1:], strict=True)
        return [
            end - begin if isinstance(end, float) else begin.elapsed_time(end)  # type: ignore[operator,union-attr]
            for begin, end in pairs
        ]


class PhaseClock:
    """Times phases by synchronising with the device at the end of each.

    That slows the step, so instrumented steps are never among the timed ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last = 0.0
        self._steps: list[dict[str, float]] = []

    def begin_step(self) -> None:
        """Start a new step."""
        self._steps.append(defaultdict(float))
        self._last = self._now_ms()

    def end(self, phase: str) -> None:
        """End a phase; with several micro-batches its parts add up."""
        now = self._now_ms()
        self._steps[-1][phase] += now - self._last
        self._last = now

    def median_step_ms(self, dropped: int = 0) -> dict[str, float]:
        """Return phase -> milliseconds in the step of median length; together they are that step.

        Of an even number of steps it is the mean of the two in the middle. Only pipelines have a bubble.

        Args:
            dropped: steps at the beginning that do not count.
        """
        steps = sorted(self._steps[dropped:], key=lambda step: sum(step.values()))
        if not steps:
            return {}
        middle = steps[(len(steps) - 1) // 2 : len(steps) // 2 + 1]
        phases = [*PHASES, *([BUBBLE] if any(BUBBLE in s for s in steps) else [])]
        return {phase: statistics.mean(s.get(phase, 0.0) for s in middle) for phase in phases}

    def _now_ms(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3
