"""No pipeline parallelism."""

from dataclasses import dataclass
from typing import ClassVar

from vitsweep.spec.technique import PipelineParallel


@dataclass(frozen=True, kw_only=True)
class NoPipelineParallel(PipelineParallel):
    """Every rank holds all blocks."""

    microbatches: ClassVar[int] = 1
    stages_per_rank: ClassVar[int] = 1
