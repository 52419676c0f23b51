"""Traced steps: every instant of a step, on one rank, in exactly one class.

Where operations overlap, on several streams or threads, an instant belongs to the first of them in this
order: optimizer, recomputation, kinds of computation, communication (which is therefore what is *exposed*),
waiting for ranks, waiting for data, and the host, in whose gaps nothing else runs. On a GPU, what the host
does counts only while the device is idle.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._autograd import DeviceType

from vitsweep.cell import sync_ranks
from vitsweep.collectives.primitives import gathered
from vitsweep.extras.explain.kernel_kinds import (
    BETWEEN,
    POOLED,
    Event,
    TimeClass,
    kind_of_kernel,
    kind_of_operator,
)
from vitsweep.job_environment import boot_id
from vitsweep.measure.communication import Collectives, quiet_profile, transfers_ms
from vitsweep.training.timed_steps import StepClock, undisturbed
from vitsweep.training.trainer import MicroBatch, Trainer

STEP = "vitsweep.step"
"""Mark between two steps."""
END = "vitsweep.end."
"""Marks the end of a phase; its name follows."""
WAIT = "vitsweep.data"
"""Range in which the host waits for a micro-batch."""

OF_COMPUTATION = (
    TimeClass.optimizer,
    TimeClass.recomputation,
    TimeClass.products,
    TimeClass.attention,
    TimeClass.elementwise,
    TimeClass.copies,
    TimeClass.fused,
    TimeClass.other,
)
LEVELS = (
    *OF_COMPUTATION,
    TimeClass.communication,
    TimeClass.ranks,
    TimeClass.data,
    TimeClass.optimizer,  # the host between operators of the optimizer, where the host computes
    TimeClass.recomputation,
    TimeClass.host,
)
"""Class by its index in the order of precedence."""
_LEVEL = {kind: place for place, kind in reversed([*enumerate(LEVELS)])}
_RANGE_LEVEL = {kind: place for place, kind in enumerate(LEVELS)}

SMALL_SHARE = 0.0002
"""Operators below this share of all traced steps are kept as one row of their class."""


class TraceMarks:
    """Marks of steps, phases and waiting for data, as the profiler records them."""

    def end(self, phase: str) -> None:
        """Mark the end of a phase."""
        _mark(END + phase)

    def watched(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Yield what a stream yields, its waiting marked."""
        while True:
            with torch.profiler.record_function(WAIT):
                item = next(stream)
            yield item


def _mark(name: str) -> None:
    with torch.profiler.record_function(name):
        pass


def record_steps(step: Callable[[], object], count: int, device: torch.device) -> list[Event]:
    """Run steps under the profiler, one after the other, and return what it recorded.

    Args:
        step: runs one training step.
        count: how many.
        device: where they run.
    """
    from torch.profiler import ProfilerActivity

    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with quiet_profile(activities, record_shapes=True) as profiled:
        for _ in range(count):
            _mark(STEP)
            step()
        _mark(STEP)
        if cuda:
            torch.cuda.synchronize()
    assert profiled.profiler is not None
    return [_event(e) for e in profiled.profiler.kineto_results.events()]


_RUNTIME_CALL = re.compile(r"(cu(da)?|hip)[A-Z]")
"""Calls of the runtime and driver, whose numbers overlap with those of operators."""


def _event(found: Any) -> Event:
    on_device = found.device_type() != DeviceType.CPU
    is_range = found.is_user_annotation()
    number = found.correlation_id()
    if on_device:
        number = found.linked_correlation_id() or -number
    elif _RUNTIME_CALL.match(found.name()) and not is_range:
        number = -number
    return Event(
        name=found.name(),
        start=found.start_ns(),
        end=found.start_ns() + found.duration_ns(),
        thread=found.start_thread_id(),
        on_device=on_device,
        is_range=is_range,
        is_node=found.scope() == 1 or found.name().startswith("autograd::engine"),
        sequence=found.sequence_nr(),
        id=number,
        shapes=() if on_device else found.shapes(),
    )


def collectives_of(events: Sequence[Event]) -> Collectives:
    """Return the collectives in the order of their start."""
    found = sorted((e for e in events if e.is_collective), key=lambda e: e.start)
    return [(e.name.split("(")[0], e.start / 1e6, (e.end - e.start) / 1e6) for e in found]


Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of time that an operation claims.

    Attributes:
        start: in nanoseconds.
        end: in the same.
        level: index in `LEVELS`.
        label: operator and shapes.
        calls: 1 for the first segment of an operation, else 0.
    """

    start: int
    end: int
    level: int
    label: tuple[str, str] = (BETWEEN, "")
    calls: int = 0


def exclusive_ns(segments: Sequence[Segment], begin: int, end: int) -> tuple[Floats, float]:
    """Return the nanoseconds that each segment gets between two times, and those that none claims.

    Each instant goes to the lowest level that claims it; segments of one level that overlap share it
    evenly. All together add up to `end - begin`.
    """
    starts = np.clip([s.start for s in segments], begin, end).astype(np.int64)
    ends = np.clip([s.end for s in segments], begin, end).astype(np.int64)
    levels = np.array([s.level for s in segments], np.int64)
    times = np.unique(np.concatenate([starts, ends, [begin, end]]))
    lengths = np.diff(times)
    first, last = np.searchsorted(times, starts), np.searchsorted(times, ends)
    active = np.zeros((len(LEVELS), len(times)))
    np.add.at(active, (levels, first), 1)
    np.add.at(active, (levels, last), -1)
    active = active.cumsum(axis=1)[:, :-1]
    winner = np.where((active > 0).any(axis=0), (active > 0).argmax(axis=0), -1)
    own = np.zeros((len(LEVELS), len(times)))
    for level in range(len(LEVELS)):
        share = np.where(winner == level, lengths / np.maximum(active[level], 1), 0.0)
        own[level, 1:] = share.cumsum()
    got = own[levels, last] - own[levels, first]
    return got, float(lengths[winner == -1].sum())


def step_rows(
    events: Sequence[Event], steps: int, transfers: Sequence[float] | None
) -> list[list[dict[str, Any]]]:
    """Return the last `steps` steps of a trace, each as rows `class, operator, shapes, calls, ms`.

    The milliseconds of a step's rows add up to its duration.

    Args:
        events: of one rank.
        steps: how many of the last are wanted; those before led in.
        transfers: of `transfers_ms`; None where waiting for ranks cannot be distinguished.
    """
    found = TraceReader(events)
    segments = [*found.segments(), *of_collectives(events, transfers)]
    spent = spent_in_steps(segments, found.borders, steps)
    whole: defaultdict[Key, float] = defaultdict(float)
    for step in spent:
        for key, (_, time) in step.items():
            whole[key] += time
    # Of the steps together, so that an operator is a row of its own in all of them or in none
    least = SMALL_SHARE * sum(whole.values())
    small = {key for key, time in whole.items() if time < least}
    return [_rows(step, small) for step in spent]


Key = tuple[TimeClass, str, str]
"""Class, operator and shapes."""


def spent_in_steps(
    segments: Sequence[Segment], borders: Sequence[int], steps: int
) -> list[dict[Key, Floats]]:
    """Return calls and nanoseconds by key in each of the last steps.

    Args:
        segments: what claims time.
        borders: where steps begin and end.
        steps: how many of the last are wanted.
    """
    found: list[dict[Key, Floats]] = []
    for begin, end in [*pairwise(borders)][-steps:]:
        inside = [s for s in segments if s.start < end and s.end > begin]
        times, rest = exclusive_ns(inside, begin, end)
        spent: defaultdict[Key, Floats] = defaultdict(lambda: np.zeros(2))
        spent[TimeClass.host, BETWEEN, ""][1] += rest
        for segment, time in zip(inside, times, strict=True):
            calls = segment.calls if segment.start >= begin else 0
            spent[LEVELS[segment.level], *segment.label] += (calls, time)
        found.append(spent)
    return found


def _rows(spent: Mapping[Key, Floats], small: Container[Key]) -> list[dict[str, Any]]:
    kept: defaultdict[Key, Floats] = defaultdict(lambda: np.zeros(2))
    for key, amounts in spent.items():
        kept[(key[0], POOLED, "") if key in small else key] += amounts
    return [
        {"class": str(kind), "operator": operator, "shapes": shapes}
        | {"calls": int(calls), "ms": float(time) / 1e6}
        for (kind, operator, shapes), (calls, time) in kept.items()
        if time or calls
    ]


def of_collectives(events: Sequence[Event], transfers: Sequence[float] | None) -> Iterator[Segment]:
    """Yield waiting for the last rank and transfer of each collective, one after the other."""
    found = sorted((e for e in events if e.is_collective), key=lambda e: e.start)
    for place, event in enumerate(found):
        transfer = event.end - event.start
        if transfers is not None:
            transfer = min(transfer, int(1e6 * transfers[place]))
        label, begun = (event.name.split("(")[0], ""), event.end - transfer
        waiting = {"start": event.start, "end": begun, "level": _LEVEL[TimeClass.ranks]}
        sending = {"start": begun, "end": event.end, "level": _LEVEL[TimeClass.communication]}
        yield Segment(**waiting, label=label)
        yield Segment(**sending, label=label, calls=1)


@dataclass(slots=True)
class Operator:
    """An operator of the host, with what it inherits from those around it."""

    event: Event
    owner: "Operator | None" = None  # the innermost around it that has a kind, itself included
    kind: TimeClass | None = None
    in_backward: bool = False
    recomputes: bool = False
    counted: bool = False


S = TypeVar("S")
T = TypeVar("T")


def innermost(
    spans: Iterable[tuple[int, int, S]], entered: Callable[[S, T | None], T]
) -> list[tuple[int, int, T]]:
    """Return spans of one thread, which are nested or disjoint, as the innermost at each time.

    Args:
        spans: start, end and what it is, in order of the starts, outer ones first.
        entered: makes of what a span is, and of the one around it, what is returned of it.
    """
    found: list[tuple[int, int, T]] = []
    stack: list[tuple[int, T]] = []
    cursor = 0

    def until(time: int) -> None:
        nonlocal cursor
        if stack and time > cursor:
            found.append((cursor, time, stack[-1][1]))
            cursor = time

    for start, end, span in spans:
        while stack and stack[-1][0] <= start:
            until(stack[-1][0])
            stack.pop()
        until(start)
        cursor = start
        stack.append((end, entered(span, stack[-1][1] if stack else None)))
    while stack:
        until(stack[-1][0])
        stack.pop()
    return found


class TraceReader:
    """Reads the operators, phases and kernels of a trace.

    Attributes:
        kernels: of the device, without those of collectives.
        waits: ranges in which the host waits for a micro-batch.
        steps: starts of the marks between steps, in nanoseconds.
        phases: (phase, start, end) on the host.
        operators: correlation -> operator, or call of the runtime, that launched a kernel.
        borders: where steps begin and end, in nanoseconds.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.kernels = [e for e in events if e.on_device and not e.is_range and not e.is_collective]
        on_host = [e for e in events if not e.on_device]
        self.waits = [e for e in on_host if e.name == WAIT]
        marks = sorted((e.start, e.name) for e in on_host if e.name.startswith((STEP, END)))
        self.steps = [start for start, name in marks if name == STEP]
        self.phases = [
            (name.removeprefix(END), begin, end)  # a phase begins where the one before it ends
            for (begin, _), (end, name) in pairwise(marks)
            if name != STEP
        ]
        self._threads: defaultdict[int, list[Event]] = defaultdict(list)
        for event in on_host:
            if not (event.is_collective or event.name.startswith("vitsweep.")):
                self._threads[event.thread].append(event)
        self._of_attention = _numbers_of_attention(events)
        self.operators: dict[int, Operator] = {}
        self._again: list[tuple[int, int]] = []
        self._of_host = [span for ops in self._threads.values() for span in self._walk(ops)]
        self.borders = self._borders()

    def segments(self) -> list[Segment]:
        """Return what claims time besides collectives."""
        waits = [
            Segment(start=e.start, end=e.end, level=_LEVEL[TimeClass.data]) for e in self.waits
        ]
        if self.kernels:
            return [*waits, *map(self._of_kernel, self.kernels)]
        between = [
            Segment(start=start, end=end, level=_RANGE_LEVEL[TimeClass.optimizer])
            for phase, start, end in self.phases
            if phase == "optimizer"
        ] + [
            Segment(start=start, end=end, level=_RANGE_LEVEL[TimeClass.recomputation])
            for start, end in self._again
        ]
        return [*waits, *between, *map(self._claimed, self._of_host)]

    def _borders(self) -> list[int]:
        """Return where steps end: on a GPU when the last kernel has that the step launched."""
        if not self.kernels:
            return self.steps
        launched = np.array([self._launch(k) for k in self.kernels])
        ends = np.array([k.end for k in self.kernels])
        begin = min(k.start for k in self.kernels)
        return [max([begin, *ends[launched < mark]]) for mark in self.steps]

    def _launch(self, kernel: Event) -> int:
        operator = self.operators.get(kernel.id)
        return operator.event.start if operator else kernel.start

    def _walk(self, events: list[Event]) -> Iterator[tuple[int, int, Operator]]:
        """Yield when each operator of a thread is the innermost with a kind."""
        spans = [(e.start, e.end, e) for e in sorted(events, key=lambda e: (e.start, -e.end))]
        for start, end, operator in innermost(spans, self._entered):
            if operator.owner:
                yield start, end, operator.owner

    def _entered(self, event: Event, parent: Operator | None) -> Operator:
        """Note an operator that begins within another, or within none."""
        operator = Operator(event, parent.owner if parent else None)
        operator.in_backward = event.is_node or bool(parent and parent.in_backward)
        # autograd numbers operators of forward passes only
        is_forward = event.sequence >= 0 and not (event.is_node or event.is_range)
        if parent and operator.in_backward:
            operator.recomputes = parent.recomputes or is_forward
            if is_forward and not parent.recomputes:
                self._note_recomputation(event, parent.event)
        kind = None if event.is_range or event.is_node else kind_of_operator(event.name)
        is_part = _is_part(kind, parent.owner if parent else None)
        if event.is_node and event.sequence in self._of_attention:
            kind = TimeClass.attention
        if kind is not None and not is_part:
            operator.owner, operator.kind = operator, kind
        if event.id:
            self.operators[event.id] = operator
        return operator

    def _note_recomputation(self, event: Event, node: Event) -> None:
        """Widen the range in which a node of autograd computes a forward pass again."""
        if self._again and self._again[-1][0] >= node.start:
            self._again[-1] = (self._again[-1][0], event.end)
        else:
            self._again.append((node.start, event.end))

    def _claimed(self, span: tuple[int, int, Operator]) -> Segment:
        start, end, owner = span
        event, calls = owner.event, not owner.counted
        owner.counted = True
        return Segment(
            start=start,
            end=end,
            level=self._level(owner, owner.kind or TimeClass.other),
            label=(event.name, _text(event.shapes)),
            calls=int(calls),
        )

    def _level(self, operator: Operator | None, kind: TimeClass) -> int:
        """Return the level of what an operator computes or launches."""
        if operator is None or kind is TimeClass.communication:
            return _LEVEL[kind]
        if self._phase(operator.event.start) == "optimizer":
            return _LEVEL[TimeClass.optimizer]
        if operator.recomputes:
            return _LEVEL[TimeClass.recomputation]
        if any(w.start <= operator.event.start < w.end for w in self.waits):
            return _LEVEL[TimeClass.data]
        return _LEVEL[kind]

    def _phase(self, time: int) -> str:
        return next((phase for phase, start, end in self.phases if start <= time < end), "")

    def _of_kernel(self, kernel: Event) -> Segment:
        operator = self.operators.get(kernel.id)
        kind = kind_of_kernel(kernel.name)
        owner = operator.owner if operator else None
        if owner and (owner.kind is TimeClass.attention or kind is TimeClass.other):
            kind = owner.kind or kind
        shapes = _text(owner.event.shapes) if owner else ""
        return Segment(
            start=kernel.start,
            end=kernel.end,
            level=self._level(operator, kind),
            label=(owner.event.name if owner else kernel.name.split("<")[0], shapes),
            calls=1,
        )


def _is_part(kind: TimeClass | None, around: Operator | None) -> bool:
    """Return whether an operator is one with that around it."""
    if around and around.kind is TimeClass.attention:  # a fused kernel knows more than its node
        return not (around.event.is_node and kind is TimeClass.attention)
    if around and kind is around.kind is TimeClass.products:
        return "::convolution" in around.event.name  # of which backends have their own inside
    return False


def _numbers_of_attention(events: Sequence[Event]) -> set[int]:
    """Return the numbers that autograd gave to what attention computes: its backward pass has the same."""
    found: set[int] = set()
    begin, end = None, 0
    numbered = (e for e in events if e.sequence >= 0 and not (e.is_node or e.on_device))
    for event in sorted(numbered, key=lambda e: e.start):
        if begin is not None and event.start >= end:
            found.update(range(begin, event.sequence))
            begin = None
        if begin is None and kind_of_operator(event.name) is TimeClass.attention:
            begin, end = event.sequence, event.end
    return found


def _text(shapes: Sequence[Any]) -> str:
    return " ".join("x".join(map(str, s)) for s in shapes if s and not isinstance(s[0], list))


COLUMNS = ("step", "class", "operator", "shapes", "calls", "ms")
"""Of the rows of a trace."""


def mean_step_ms(trainer: Trainer, stream: Iterator[MicroBatch], steps: int, lead_in: int) -> float:
    """Return the mean time of some steps in milliseconds, after others that lead in."""
    clock = StepClock(trainer.world.device)
    clock.mark()
    for _ in range(lead_in + steps):
        trainer.step(stream)
        clock.mark()
    return float(np.mean(clock.times_ms()[lead_in:]))


def run(trainer: Trainer, stream: Iterator[MicroBatch], prefetched_steps: int) -> dict[str, Any]:
    """Take untraced and traced steps; both empty the loader's queue first, which a pause fills.

    Returns:
        `plain_ms`, the mean duration of as many steps without the profiler, just before the traced ones; and
        `rows` of `COLUMNS`.
    """
    steps, lead_in = trainer.cell.measurement.traced_steps, prefetched_steps + 1
    marks = TraceMarks()
    watched = marks.watched(stream)
    with undisturbed(trainer):
        sync_ranks(trainer.world)
        plain_ms = mean_step_ms(trainer, stream, steps, lead_in)
        sync_ranks(trainer.world)
        events = record_steps(
            lambda: trainer.step(watched, marks), lead_in + steps, trainer.world.device
        )
    transfers = transfers_ms(gathered(collectives_of(events)), gathered(boot_id()))
    found = step_rows(events, steps, transfers)
    rows = [[step, *row.values()] for step, rows in enumerate(found) for row in rows]
    return {"plain_ms": plain_ms, "rows": rows}


def samples_of(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the samples of a run from what `run` returned in each of its ranks."""
    rows = [[rank, *row] for rank, own in enumerate(ranks) for row in own["rows"]]
    return {
        "trace": {
            "columns": ["rank", *COLUMNS],
            "rows": [[round(v, 5) if isinstance(v, float) else v for v in row] for row in rows],
            "plain_ms": max(rank["plain_ms"] for rank in ranks),
            "critical_rank": critical_rank(ranks),
        }
    }


def critical_rank(ranks: Sequence[Mapping[str, Any]]) -> int:
    """Return the rank that the others wait for: that which waits least, then communicates least."""

    def spent(rank: int, kind: TimeClass) -> float:
        return sum(ms for _, own, _, _, _, ms in ranks[rank]["rows"] if own == kind)

    kinds = TimeClass.ranks, TimeClass.communication
    return min(range(len(ranks)), key=lambda rank: [spent(rank, kind) for kind in kinds])
