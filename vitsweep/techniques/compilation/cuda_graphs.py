"""Replay the kernels of a whole training step as one CUDA graph: those of eager PyTorch, or compiled ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.technique import Compilation
from vitsweep.techniques.compilation.torch_compile import CompileBlocks

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class CudaGraphs(Compilation):
    """Record all kernels of a step once and replay them: saves the host's time per launch.

    Forward, backward, clipping and the update of the optimizer are one graph; nothing is fused, so
    that the effect of the replay stands by itself. A step that cannot be recorded fails by name.
    """

    scope: ClassVar[Literal["nothing", "block", "model"]] = "model"
    captures_step: ClassVar[bool] = True

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse what a graph cannot hold."""
        return _capture_conflicts(self, cell)


@dataclass(frozen=True, kw_only=True)
class CompiledCudaGraphs(CompileBlocks):
    """Compile every block, then record all kernels of a step once and replay them.

    The first steps compile; the recording holds the kernels that TorchInductor wrote, so that fusion
    saves memory traffic and the replay saves the host's time per launch.
    """

    captures_step: ClassVar[bool] = True

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse what a graph cannot hold, and what compiled blocks cannot do."""
        yield from _capture_conflicts(self, cell)
        yield from super().conflicts(cell)


def _capture_conflicts(choice: Compilation, cell: "CellSpec") -> Iterator[str]:
    """Yield what a graph cannot hold: other ranks, decisions of the host, changing numbers."""
    if cell.resources.device == "cpu":
        yield (
            f"`compilation={choice.name}` needs `resources.device=cuda`; got cpu, which has no "
            "CUDA graphs. Use `compilation=compile_blocks`."
        )
    if cell.sharding.name != "none" or cell.resources.world_size > 1:
        yield (
            f"`compilation={choice.name}` records the step of one GPU, without collectives; got "
            f"`sharding={cell.sharding.name}` on {cell.resources.world_size} ranks. Use "
            "`sharding=none` with `resources.nodes=1 resources.ranks_per_node=1`, or "
            "`compilation=compile_blocks`."
        )
    if not cell.optimizer.capturable:
        yield (
            f"`compilation={choice.name}` cannot record `optimizer={cell.optimizer.name}`, which "
            "keeps numbers on the host that change from step to step. Use "
            "`optimizer=adamw_fused`, or `compilation=compile_blocks`."
        )
    if cell.precision.plan().loss_scale is not None:
        yield (
            f"`compilation={choice.name}` cannot record `precision={cell.precision.name}` with "
            f"`precision.loss_scale={cell.precision.plan().loss_scale}`, under which the host "
            "decides whether a step counts. Use `precision.half_dtype=bfloat16` with "
            "`precision.loss_scale=null`, or `compilation=compile_blocks`."
        )
    if cell.task.epochs:
        yield (
            f"`compilation={choice.name}` records the learning rate as it is, and "
            f"`task={cell.task.name}` changes it from step to step. Use `task=measure`, or "
            "`compilation=compile_blocks`."
        )
