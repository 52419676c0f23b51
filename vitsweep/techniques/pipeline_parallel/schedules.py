"""Pipeline parallelism by torch.distributed.pipelining."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Gt

from vitsweep.spec.model_parallel import PipelineParallel
from vitsweep.spec.rules import largest_degree

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec
    from vitsweep.world import World


@dataclass(frozen=True, kw_only=True)
class Schedule(PipelineParallel):
    """Blocks split over `mesh.pipeline` ranks, a batch into micro-batches.

    Attributes:
        schedule: `gpipe` (arXiv:1811.06965), all forward passes, then all backward ones;
            `one_f_one_b` (PipeDream-Flush, arXiv:2006.09503), in turns, so that few micro-batches
            are in flight.
        microbatches: parts of a replica's batch that follow one another through the stages.
        stages_per_rank: 1; it keeps the ids of cells from when there could be more.
    """

    schedule: Literal["gpipe", "one_f_one_b"]
    microbatches: Annotated[int, Gt(0)]
    stages_per_rank: Literal[1] = 1

    axes: ClassVar[tuple[str, ...]] = ("pipeline",)

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse stages without a block, uneven micro-batches, and what a schedule does not allow."""
        me, ranks = f"pipeline_parallel={self.name}", cell.mesh.pipeline
        depth = cell.transformer.depth
        if ranks > depth:
            fits = largest_degree(cell, ranks, lambda d: d <= depth)
            yield (
                f"`{me}` over `mesh.pipeline={ranks}` makes {ranks} stages of `model.depth={depth}` blocks: "
                f"try `mesh.pipeline={fits}` or more blocks."
            )
        if cell.micro_batch % self.microbatches:
            yield (
                f"`pipeline_parallel.microbatches={self.microbatches}` must divide the "
                f"{cell.micro_batch} images of a replica: try a power of two below, or another "
                "`batch.images_per_step`."
            )
        if cell.batch.accumulation_steps > 1:
            yield (
                f"`batch.accumulation_steps={cell.batch.accumulation_steps}` with `{me}` would "
                "split the batch twice: use `batch.accumulation_steps=1` and more "
                "`pipeline_parallel.microbatches`."
            )
        if self.schedule == "one_f_one_b" and self.microbatches < ranks:
            yield (
                f"`pipeline_parallel.microbatches={self.microbatches}` must be at least the {ranks} "
                f"stages of `{me}`, all of which are to be busy: use "
                f"`pipeline_parallel.microbatches={ranks}`, or `pipeline_parallel=gpipe`."
            )
        if cell.compilation.scope == "model":
            yield (
                f"`{me}` hands activations from stage to stage, which "
                f"`compilation={cell.compilation.name}` would trace through: use "
                "`compilation=compile_blocks`."
            )

    def stage(
        self,
        model: "nn.Module",
        world: "World",
        forward_context: Callable[[], AbstractContextManager[Any]],
    ) -> "nn.Module":
        """Keep this rank's stage."""
        from vitsweep.techniques.pipeline_parallel.runner import cut

        group = world.axis("pipeline").get_group()
        return cut(model, group.rank(), group.size(), forward_context)

    def runner(self, stage: "nn.Module", criterion: Callable[..., Any], world: "World") -> Any:
        """Return what runs a batch through the stages."""
        from vitsweep.techniques.pipeline_parallel.runner import PipelineRunner

        return PipelineRunner(stage, criterion, self.schedule, self.microbatches, world)
