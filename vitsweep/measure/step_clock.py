"""StepClock: time between two optimizer steps, without disturbing them."""

import time

import torch


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
        """Note that a step ends and the next one begins."""
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
