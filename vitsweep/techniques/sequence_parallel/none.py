"""No sequence parallelism."""

from dataclasses import dataclass

from vitsweep.spec.model_parallel import SequenceParallel


@dataclass(frozen=True, kw_only=True)
class NoSequenceParallel(SequenceParallel):
    """Every rank sees whole images."""
