"""Requests to save or to stop a training, and the agreement of all ranks on the step before which."""

from collections.abc import Callable
from enum import IntEnum
from threading import Event

import torch
import torch.distributed as dist


class Decision(IntEnum):
    """What all ranks do before the next step; of several wishes the largest counts."""

    go_on = 0
    save = 1
    stop = 2


class StopConsensus:
    """Lets all ranks save, or stop, before the same step as soon as one rank wants to.

    Args:
        requested: set by a signal handler where this rank is requested to stop.
        device: of this rank. The wish is reduced in the device's stream, so no step waits for it: on
            a GPU each call returns the answer to the call before.
    """

    def __init__(self, requested: Event, device: torch.device) -> None:
        self._requested, self._device = requested, device
        self._pending: Callable[[], int] = lambda: 0

    def agreed(self, *, save_due: bool = False, at_once: bool = False) -> Decision:
        """Return what all ranks do now; every rank calls it before every step.

        Args:
            save_due: this rank wants a checkpoint.
            at_once: wait for the answer to this very call, as after the last step.
        """
        wish = Decision.stop if self._requested.is_set() else Decision(int(save_due))
        before, self._pending = self._pending, self._reduce(wish)
        found = before()
        if at_once or self._device.type == "cpu":
            found, self._pending = max(found, self._pending()), lambda: 0
        return Decision(found)

    def _reduce(self, wish: Decision) -> Callable[[], int]:
        """Start to reduce the wish over all ranks; return what reads the result."""
        flag = torch.full((1,), int(wish), dtype=torch.int32, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if self._device.type == "cpu":
            return lambda: int(flag)
        result = torch.empty_like(flag, device="cpu", pin_memory=True)
        result.copy_(flag, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> int:
            copied.synchronize()
            return int(result)

        return read
