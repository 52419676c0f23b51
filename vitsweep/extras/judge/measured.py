"""`with vitsweep.measured():` around a training loop that hands nothing over: it is timed, and not proved."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class Channel(Protocol):
    """JSON lines to and from the judge."""

    def send(self, **entry: Any) -> None:
        """Send one line."""

    def receive(self) -> dict[str, Any]:
        """Return the next line."""


CHANNEL: Channel | None = None
"""To the judge, in a script that `vitsweep judge --script` runs, until its loop was timed."""


@contextmanager
def measured() -> Iterator[None]:
    """Let the judge time what stands inside the block; elsewhere it does nothing.

    The judge reads its clock before the block begins and when it has ended. It can check no loss and
    no weight: the verdict is "not proved". The first block of a script counts, once.
    """
    global CHANNEL
    channel, CHANNEL = CHANNEL, None
    if channel is None:
        yield
        return
    channel.send(ready=True)
    channel.receive()
    yield
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    channel.send(losses=[], sums={})
