"""Why something is sent: who sends says so, who counts reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Purpose = Literal["parameter", "gradient", "activation"]

_purpose: ContextVar[Purpose | None] = ContextVar("purpose", default=None)


@contextmanager
def sent_as(purpose: Purpose) -> Iterator[None]:
    """Book collectives inside under `purpose`."""
    token = _purpose.set(purpose)
    try:
        yield
    finally:
        _purpose.reset(token)


def current_purpose() -> Purpose | None:
    """Return what collectives are booked under here; None where nobody said."""
    return _purpose.get()
