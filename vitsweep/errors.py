"""Errors that the user can fix, printed without a traceback, and the exit codes of all commands."""

import errno
from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """How a command ended."""

    ok = 0  # all cells are measured, or on their way
    gate_failed = 1
    bad_input = 2
    not_all_measured = 3
    gate_undecided = 4  # a cell is worse; whether beyond the tolerance is not shown
    interrupted = 130  # or detached from jobs that go on
    terminated = 143  # the same, by SIGTERM


STORAGE_ERRNOS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.EFBIG
)  # fmt: skip
"""Of an OSError where the disk is full, its quota used up, read-only or failing, a file server has lost the
file, or it is larger than its file system or `ulimit -f` allows."""


def storage_error(error: BaseException) -> OSError | None:
    """Return the OSError of a disk or file server that an exception is, or that led to it; else None."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        if isinstance(current, OSError) and current.errno in STORAGE_ERRNOS:
            return current
        seen.append(current)
        current = current.__cause__ or current.__context__
    return None


def storage_sentences(error: OSError) -> str:
    """Return the message on an error of `STORAGE_ERRNOS`: what is safe, and what to do."""
    what = f"`{error.filename}`" if error.filename else "The output or the results folder"
    way_out = "make room, or wait until its file system answers,"
    if error.errno == errno.EFBIG:
        way_out = "allow larger files (`ulimit -f unlimited`), or use another file system,"
    return (
        f"{what} cannot be read or written ({error.strerror}). What was measured is kept: {way_out} and type "
        "the same command again."
    )


class VitsweepError(Exception):
    """Something the user asked for cannot be done; the text names knob, value, rule and way out."""


class BadValueError(VitsweepError):
    """A key or value of the configuration is wrong."""


class ImpossibleCellError(VitsweepError):
    """One cell, or all cells of a command, that cannot run.

    Args:
        reasons: all of them.
        lines: the same, each with the cells that it is about, where there are several cells.
    """

    def __init__(self, reasons: Sequence[str], lines: Sequence[str] = ()) -> None:
        self.reasons = tuple(reasons)
        head = "None of the cells can run:" if lines else "This cell cannot run:"
        super().__init__("\n".join([head, *(f"  - {line}" for line in lines or reasons)]))


class RanksApartError(VitsweepError):
    """In a step this rank does something else than others: it must exchange nothing with them any more."""


class SweepStopped(KeyboardInterrupt):
    """The user stopped a sweep, or detached from its jobs, and got the message on what is kept."""
