"""A request to stop training, and the agreement of all ranks on the step before which they do."""

from collections.abc import Callable
from threading import Event

import torch
import torch.distributed as dist


class StopConsensus:
    """Says on every rank at the same step that training shall stop, as soon as one rank was told.

    Args:
        told: set, by a signal handler, where this rank shall stop.
        device: of this rank; the question travels with the device's other work, so no step waits
            for it: on a GPU the answer is that to the question of the step before.
    """

    def __init__(self, told: Event, device: torch.device) -> None:
        self._told, self._device = told, device
        self._asked: Callable[[], bool] = lambda: False

    def agreed(self, *, at_once: bool = False) -> bool:
        """Return whether all ranks stop now; every rank asks before every step.

        Args:
            at_once: wait for the answer to this very question, as after the last step.
        """
        before, self._asked = self._asked, self._ask()
        return before() or ((at_once or self._device.type == "cpu") and self._asked())

    def _ask(self) -> Callable[[], bool]:
        flag = torch.full((1,), int(self._told.is_set()), dtype=torch.int32, device=self._device)
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if self._device.type == "cpu":
            return lambda: bool(flag)
        answer = torch.empty_like(flag, device="cpu", pin_memory=True)
        answer.copy_(flag, non_blocking=True)
        there = torch.cuda.Event()
        there.record()

        def read() -> bool:
            there.synchronize()
            return bool(answer)

        return read
