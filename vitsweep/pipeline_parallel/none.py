"""No pipeline parallelism."""

from dataclasses import dataclass

from vitsweep.spec.technique import PipelineParallel


@dataclass(frozen=True, kw_only=True)
class NoPipelineParallel(PipelineParallel):
    """Every rank holds all blocks."""
