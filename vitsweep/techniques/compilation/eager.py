"""Run every operation as it comes."""

from dataclasses import dataclass

from vitsweep.spec.technique import Compilation


@dataclass(frozen=True, kw_only=True)
class Eager(Compilation):
    """Nothing is compiled or captured."""
