"""How a step splits into data, forward, backward and optimizer: measured on separate steps."""

import time
from collections import defaultdict

import numpy as np
import torch

PHASES = ("data", "forward", "backward", "optimizer")
BUBBLE = "bubble"
"""Between the chunks of a pipeline: waiting for other stages and for what they send."""


class PhaseClock:
    """Times phases by waiting for the device at each border.

    The waits change the step, so instrumented steps are never among the timed ones.
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
