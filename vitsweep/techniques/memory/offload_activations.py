"""Keep activations in the memory of the host."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.technique import Memory, Technique

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class OffloadActivations(Memory):
    """Copy what blocks save for the backward pass to pinned host memory, and back when needed.

    Copies run on streams of their own: those of a block beside the forward pass of the next one, and
    back beside the backward pass of the block after it. Parameters stay on the device. Nothing is computed
    twice; the price is two copies over PCIe, and the activations of two blocks on the device.
    """

    wraps_blocks: ClassVar[bool] = True

    def trace_substitute(self) -> tuple[Technique, str]:
        """Itself: copies are traced, the link to the host is not."""
        return self, (
            f"`memory={self.name}` is counted with copies at the speed of the device's memory: "
            "where the link to the host is the limit, the step takes longer."
        )

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse CPU, and compiled code, which does not run hooks on saved tensors."""
        if cell.resources.device == "cpu":
            yield (
                f"`memory={self.name}` needs `resources.device=cuda`; got cpu, where activations "
                "lie in host memory already and a copy would only cost time. Use "
                "`memory=recompute_blocks`."
            )
        if cell.compilation.scope != "nothing":
            yield (
                f"`memory={self.name}` works through hooks on saved tensors, which "
                f"`compilation={cell.compilation.name}` does not run as written. Use "
                "`compilation=eager`, or `memory=recompute_blocks`."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Save the activations of every block on the host."""
        from vitsweep.techniques.memory.offloaded_blocks import offloaded

        return offloaded(model)
