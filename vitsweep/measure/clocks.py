"""Clocks of a training step: the whole step undisturbed, and its phases on separate steps."""

import time
from collections import defaultdict

import numpy as np
import torch

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

    def medians_ms(self) -> dict[str, float]:
        """Return phase -> median over the instrumented steps, in milliseconds.

        Only pipelines have a bubble.
        """
        if not self._steps:
            return {}
        phases = [*PHASES, *([BUBBLE] if any(BUBBLE in s for s in self._steps) else [])]
        return {phase: float(np.median([s[phase] for s in self._steps])) for phase in phases}

    def _now_ms(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() * 1e3
