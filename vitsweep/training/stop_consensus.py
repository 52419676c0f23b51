"""A request to stop training, and the agreement of all ranks on the step before which they stop."""

from collections.abc import Callable
from threading import Event

import torch
import torch.distributed as dist


class StopConsensus:
    """Lets all ranks stop before the same step as soon as one rank was requested to.

    Args:
        requested: set by a signal handler where this rank is requested to stop.
        device: of this rank. The flag is reduced in the device's stream, so no step waits for it: on
            a GPU each call returns the answer to the call before.
    """

    def __init__(self, requested: Event, device: torch.device) -> None:
        self._requested, self._device = requested, device
        self._pending: Callable[[], bool] = lambda: False

    def agreed(self, *, at_once: bool = False) -> bool:
        """Return whether all ranks stop now; every rank calls it before every step.

        Args:
            at_once: wait for the answer to this very call, as after the last step.
        """
        before, self._pending = self._pending, self._reduce()
        return before() or ((at_once or self._device.type == "cpu") and self._pending())

    def _reduce(self) -> Callable[[], bool]:
        """Start to reduce the flag over all ranks; return what reads the result."""
        flag = torch.full(
            (1,), int(self._requested.is_set()), dtype=torch.int32, device=self._device
        )
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if self._device.type == "cpu":
            return lambda: bool(flag)
        result = torch.empty_like(flag, device="cpu", pin_memory=True)
        result.copy_(flag, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()

        def read() -> bool:
            copied.synchronize()
            return bool(result)

        return read
