"""Errors that are the user's to mend: printed as sentences, without a traceback."""

from collections.abc import Sequence


class VitsweepError(Exception):
    """Something the user asked for cannot be done; the text names knob, value, rule and way out."""


class BadValueError(VitsweepError):
    """A key or value of the configuration is wrong."""


class ImpossibleCellError(VitsweepError):
    """A combination that cannot run, with all its reasons."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("This cell cannot run:\n" + "\n".join(f"  - {r}" for r in self.reasons))
