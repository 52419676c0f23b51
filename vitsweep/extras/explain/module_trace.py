"""Time by module: traced steps in which each part of the model names its forward pass."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vitsweep.extras.explain.kernel_kinds import Event
from vitsweep.extras.explain.step_trace import (
    Segment,
    TraceReader,
    innermost,
    of_collectives,
    spent_in_steps,
)
from vitsweep.model.block import blocks_of

MODULE = "vitsweep.module."
"""Begins the name of a range in which a module computes forward."""
COMMUNICATION, DATA, BETWEEN = "(communication)", "(waiting for data)", "(between)"
OF_MODULES, OF_COLLECTIVES, OF_WAITS = range(3)
"""Levels: a module that computes comes before a collective, a collective before waiting for data."""

Span = tuple[int, int, str]
"""Start and end in nanoseconds, and the module."""


def units_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a model by name: its blocks, and whatever lies beside them."""
    blocks = {id(block) for block in blocks_of(model)}

    def parts(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        inner = {id(child) for child in module.modules()} - {id(module)}
        if name and (id(module) in blocks or not inner & blocks):
            yield name, module
            return
        for child, part in module.named_children():
            yield from parts(f"{name}.{child}" if name else child, part)

    return dict(parts("", model))


@contextmanager
def naming_modules(model: nn.Module) -> Iterator[None]:
    """Let the parts of an uncompiled model name their forward passes in traces, until the block ends."""
    handles = []
    for name, unit in units_of(model).items():
        begun: list[Any] = []

        def enter(*_: object, name: str = name, begun: list[Any] = begun) -> None:
            begun.append(torch.profiler.record_function(MODULE + name))
            begun[-1].__enter__()

        def leave(*_: object, begun: list[Any] = begun) -> None:
            begun.pop().__exit__(None, None, None)

        handles.append(unit.register_forward_pre_hook(enter, prepend=True))
        # recomputation may end a forward pass early, by an exception
        handles.append(unit.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def module_rows(events: Sequence[Event], steps: int) -> list[list[Any]]:
    """Return rows `step, module, ms` of the last `steps` steps; those of a step add up to its duration.

    The backward pass of an operator has the number that autograd gave it in the forward pass, and belongs
    to the same module, as does what is recomputed. What lies in no module stands under its phase, such as
    `(backward)`: a compiled model is one row of each phase.

    Args:
        events: of one rank, recorded within `naming_modules`.
        steps: how many of the last are wanted.
    """
    reader = TraceReader(events)
    where = _Timelines(events, reader)
    collectives = [
        replace(e, level=OF_COLLECTIVES, label=(COMMUNICATION, ""))
        for e in of_collectives(events, None)
    ]
    found = spent_in_steps([*where.segments(), *collectives], reader.borders, steps, BETWEEN)
    rows: list[list[Any]] = []
    for step, spent in enumerate(found):
        by_module: defaultdict[str, float] = defaultdict(float)
        for (_, module, _), (_, time, _) in spent.items():
            by_module[module] += float(time)
        rows += [[step, module, time / 1e6] for module, time in by_module.items() if time]
    return rows


class _Timelines:
    """Which module each thread of the host is in, at any time."""

    def __init__(self, events: Sequence[Event], reader: TraceReader) -> None:
        self._reader = reader
        spans: defaultdict[int, list[Span]] = defaultdict(list)
        for event in events:
            if event.name.startswith(MODULE) and not event.on_device:
                module = event.name.removeprefix(MODULE)
                spans[event.thread].append((event.start, event.end, module))
        self._lines = {thread: _innermost(found) for thread, found in spans.items()}
        numbered = [e for e in events if e.sequence >= 0 and not (e.on_device or e.is_range)]
        module_of = {e.sequence: self.at(e.thread, e.start) for e in numbered if not e.is_node}
        for event in numbered:
            if event.is_node and (owner := module_of.get(event.sequence)):
                spans[event.thread].append((event.start, event.end, owner))
        for thread in {e.thread for e in events if e.is_range and e.start in {*reader.steps}}:
            for phase, start, end in reader.phases:
                spans[thread].append((start, end, f"({phase})"))
        self._lines = {thread: _innermost(found) for thread, found in spans.items()}

    def at(self, thread: int, time: int) -> str:
        """Return the module that a thread is in; "" where it is in none."""
        line = self._lines.get(thread, [])
        place = bisect_right(line, (time, float("inf"), "")) - 1
        return line[place][2] if place >= 0 and time < line[place][1] else ""

    def segments(self) -> Iterator[Segment]:
        """Yield what modules claim: the time of their kernels, or of the host where there are none."""
        for wait in self._reader.waits:
            yield Segment(start=wait.start, end=wait.end, level=OF_WAITS, label=(DATA, ""))
        if not self._reader.kernels:
            for line in self._lines.values():
                for start, end, module in line:
                    yield Segment(start=start, end=end, level=OF_MODULES, label=(module, ""))
        for kernel in self._reader.kernels:
            operator = self._reader.operators.get(kernel.id)
            event = operator.event if operator else kernel
            module = self.at(event.thread, event.start) or BETWEEN
            yield Segment(start=kernel.start, end=kernel.end, level=OF_MODULES, label=(module, ""))


def _innermost(spans: Sequence[Span]) -> list[Span]:
    # of a phase and a module that begin and end together, the module is within the phase
    order = sorted(spans, key=lambda span: (span[0], -span[1], not span[2].startswith("(")))
    return innermost(order, lambda module, _: module)
