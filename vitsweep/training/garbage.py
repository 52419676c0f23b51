"""Python's collector of objects in reference cycles, kept out of steps or called at chosen ones."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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


class ScheduledCollection:
    """Collects the two young generations, what recent steps left behind, every few steps.

    Args:
        every_steps: 0 for never.
    """

    def __init__(self, every_steps: int) -> None:
        self._every, self._steps = every_steps, 0

    def after_step(self) -> None:
        """A step of training is over."""
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            gc.collect(1)
