"""Nothing compiled, every block compiled, or the whole model: `torch.compile` with TorchInductor."""

import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.technique import Compilation

if TYPE_CHECKING:
    from torch import nn

    from vitsweep.spec.cell_spec import CellSpec


def missing_compiler(choice: Compilation, cell: "CellSpec") -> Iterator[str]:
    """Yield a reason where TorchInductor would find no C++ compiler on a CPU."""
    command = os.environ.get("CXX", "g++")  # what TorchInductor calls
    if cell.resources.device == "cpu" and shutil.which(shlex.split(command)[0]) is None:
        yield (
            f"`compilation={choice.name}` needs a C++ compiler on cpu; found no `{command}`. "
            "Install one (Debian: `apt-get install g++`), name it in CXX, or use "
            "`compilation=eager`."
        )


@dataclass(frozen=True, kw_only=True)
class Eager(Compilation):
    """Nothing is compiled or captured."""


@dataclass(frozen=True, kw_only=True)
class CompileBlocks(Compilation):
    """`torch.compile` of each block; all blocks share one compilation, which keeps it short."""

    needs_spawn: ClassVar[bool] = True
    scope: ClassVar[Literal["nothing", "block", "model"]] = "block"
    fuses_kernels: ClassVar[bool] = True

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Say where the C++ compiler is missing that TorchInductor needs."""
        yield from missing_compiler(self, cell)

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Compile every block in place: same modules, same names."""
        from vitsweep.model.block import blocks_of

        for block in blocks_of(model):
            # Static shapes; the loop sees no other batch but that of evaluation.
            block.compile(dynamic=False)
        return model


@dataclass(frozen=True, kw_only=True)
class CompileModel(Compilation):
    """`torch.compile` of the model in one graph: fuses across blocks, compiles for long.

    Under `sharding=fsdp`, `zero2` and `hsdp` the hooks that gather each block's parameters cut the
    graph there: it is what `compile_blocks` is then, compiled block after block.
    """

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
