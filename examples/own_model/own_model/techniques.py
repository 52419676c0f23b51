"""A technique of our own: recompute the first blocks only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Gt

from vitsweep.spec.technique import Memory


@dataclass(frozen=True, kw_only=True)
class RecomputeFirst(Memory):
    """Activation checkpointing of the first blocks; the last ones keep theirs.

    Attributes:
        num_blocks: how many are recomputed.
    """

    num_blocks: Annotated[int, Gt(0)]

    wraps_blocks: ClassVar[bool] = True
    forwards_per_step: ClassVar[int] = 2

    def apply(self, model: Any) -> Any:
        """Run the first blocks under a checkpoint."""
        from vitsweep.model.block import blocks_of, swap_block_class
        from vitsweep.techniques.memory.checkpointed_blocks import RecomputedBlock

        for block in blocks_of(model)[: self.num_blocks]:
            swap_block_class(block, RecomputedBlock)
        return model

    def conflicts(self, cell: Any) -> Iterator[str]:
        """Refuse stages of a pipeline, which do not know whether their blocks come first."""
        if cell.mesh.pipeline > 1:
            yield (
                f"`memory={self.name}` counts blocks from the first one, and a stage of "
                f"`pipeline_parallel={cell.pipeline_parallel.name}` holds some of them: use "
                "`memory=recompute_blocks`."
            )
