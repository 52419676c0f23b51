"""Compile the whole model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.technique import Compilation
from vitsweep.techniques.compilation._compiler import missing_compiler

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


@dataclass(frozen=True, kw_only=True)
class CompileModel(Compilation):
    """`torch.compile` of the model in one graph: fuses across blocks, compiles for long."""

    needs_spawn: ClassVar[bool] = True
    scope: ClassVar[Literal["nothing", "block", "model"]] = "model"
    fuses_kernels: ClassVar[bool] = True

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Say where the C++ compiler is missing that TorchInductor needs."""
        yield from missing_compiler(self, cell)

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Compile the model in place: same module, same names."""
        model.compile(dynamic=False)
        return model
