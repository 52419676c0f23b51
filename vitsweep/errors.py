"""Errors that are the user's to mend: printed as sentences, without a traceback."""

import errno
from collections.abc import Sequence

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Of an OSError where results cannot be written: disk full, quota used up, mounted read-only."""


class VitsweepError(Exception):
    """Something the user asked for cannot be done; the text names knob, value, rule and way out."""


class BadValueError(VitsweepError):
    """A key or value of the configuration is wrong."""


class ImpossibleCellError(VitsweepError):
    """A combination that cannot run, with all its reasons."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("This cell cannot run:\n" + "\n".join(f"  - {r}" for r in self.reasons))
