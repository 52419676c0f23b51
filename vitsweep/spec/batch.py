"""How many images make a step, and how large they are."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Images of one optimizer step.

    Attributes:
        images_per_step: images of one optimizer step, counted as `scope` says.
        scope: `total` over all ranks, or `per_replica` (ranks that share an image count once).
        accumulation_steps: micro-batches per optimizer step.
        resolution_px: side of an image.
    """

    name: str
    images_per_step: Annotated[int, Gt(0)]
    scope: Literal["total", "per_replica"]
    accumulation_steps: Annotated[int, Gt(0)]
    resolution_px: Annotated[int, Gt(0)]

    def total(self, replicas: int) -> int:
        """Images of one optimizer step over all ranks."""
        return self.images_per_step * (replicas if self.scope == "per_replica" else 1)

    def micro_batch(self, replicas: int) -> int:
        """Images of one forward pass on one replica."""
        return self.total(replicas) // (replicas * self.accumulation_steps)
