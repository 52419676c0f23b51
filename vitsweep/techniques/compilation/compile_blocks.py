"""Compile one block, for all blocks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.technique import Compilation
from vitsweep.techniques.compilation._compiler import missing_compiler

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class CompileBlocks(Compilation):
    """`torch.compile` of each block; all blocks share one compiled code, so that it is short."""

    needs_spawn: ClassVar[bool] = True
    scope: ClassVar[Literal["nothing", "block", "model"]] = "block"
    fuses_kernels: ClassVar[bool] = True

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Say where the C++ compiler is missing that TorchInductor needs."""
        yield from missing_compiler(self, cell)

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Compile every block in place: same modules, same names."""
        from vitsweep.model.block import Block

        for block in model.modules():
            if isinstance(block, Block):
                # Static shapes; the loop sees no other batch but that of evaluation.
                block.compile(dynamic=False)
        return model
