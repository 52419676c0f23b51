"""Replay the kernels of forward and backward as CUDA graphs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.technique import Compilation

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class CudaGraphs(Compilation):
    """Record all kernel launches once and replay them: saves the host's time per launch.

    torch.compile traces the model and hands the graphs to its `cudagraphs` backend, which fuses
    nothing, so that the effect of the replay stands by itself.
    """

    needs_spawn: ClassVar[bool] = True
    scope: ClassVar[Literal["nothing", "block", "model"]] = "model"

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse a device without graphs, and parameters or gradients that move between steps."""
        if cell.resources.device == "cpu":
            yield (
                f"`compilation={self.name}` needs `resources.device=cuda`; got cpu, which has no "
                "CUDA graphs. Use `compilation=compile_blocks`."
            )
        if cell.sharding.shards_parameters:
            yield (
                f"`compilation={self.name}` replays fixed addresses, and `sharding="
                f"{cell.sharding.name}` gathers parameters anew in every step. Use `sharding=ddp` "
                "or `sharding=zero1`, or `compilation=compile_blocks`."
            )

        if cell.batch.accumulation_steps > 1:
            yield (
                f"`compilation={self.name}` writes the gradients of every micro-batch to the same "
                f"place; `batch.accumulation_steps={cell.batch.accumulation_steps}` would add to "
                "overwritten ones. Use `batch.accumulation_steps=1`, or "
                "`compilation=compile_blocks`."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Compile the model in place with the backend that records and replays."""
        model.compile(backend="cudagraphs", dynamic=False)
        return model
