"""torch's FlexAttention, compiled for the shape at hand."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitsweep.spec.technique import AttentionKernel, Technique
from vitsweep.techniques.attention.sdpa import ScaledDotProduct

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class Flex(AttentionKernel):
    """A fused kernel that torch.compile writes (arXiv:2412.05496), here without mask or bias.

    The kernel is compiled in the first steps, also with `compilation=eager`.
    """

    recomputes_scores: ClassVar[bool] = True  # the scores are not kept

    def trace_substitute(self) -> tuple[Technique, str]:
        """Flash attention, whose sizes are the same."""
        flash = ScaledDotProduct(name="sdpa_auto", backend="auto")
        return flash, f"`attention={self.name}` is counted as flash attention."

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse a device without a backward pass."""
        if cell.resources.device == "cpu":
            yield (
                f"`attention={self.name}` needs `resources.device=cuda`; got cpu, where torch's "
                "FlexAttention has no backward pass. Use `attention=sdpa_flash`."
            )

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Replace the kernel of every block."""
        from vitsweep.techniques.attention.kernels import attend_by_flex, put_into_blocks

        return put_into_blocks(model, attend_by_flex)
