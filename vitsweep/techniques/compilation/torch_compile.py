"""Nothing compiled, every block compiled, or the whole model: `torch.compile` with TorchInductor."""

import os
import shlex
import shutil
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
class TorchCompile(Compilation):
    """`torch.compile` with TorchInductor.

    Attributes:
        mode: `default`; `max_autotune` measures several kernels for each matrix product, compiles for
            minutes and takes the fastest; `reduce_overhead` replays kernels as CUDA graphs.
        optimizer_step: False; it keeps the ids of cells from when the update could be compiled too.
    """

    mode: Literal["default", "max_autotune", "reduce_overhead"]
    optimizer_step: Literal[False] = False

    rounds_apart: ClassVar[bool] = True

    @abstractmethod
    def apply(self, model: "nn.Module") -> "nn.Module":
        """Compile a model in place: same modules, same names."""

    @property
    def replays_graphs(self) -> bool:
        """Whether kernels are to be replayed as CUDA graphs."""
        return self.mode == "reduce_overhead"

    @property
    def arguments(self) -> dict[str, Any]:
        """What torch.compile is given."""
        # Static shapes; the loop sees no other batch but that of evaluation.
        if self.mode == "max_autotune":  # the mode of this name brings CUDA graphs as well
            return {"dynamic": False, "options": {"max_autotune": True}}
        return {"dynamic": False, "mode": self.mode.replace("_", "-")}

    def compile(self, module: "nn.Module") -> None:
        """Compile a module in place, with the sends and receives of a ring inside its graph."""
        from torch._dynamo import config

        # torch 2.13; without it each hop cuts the graph
        if hasattr(config, "enable_p2p_compilation"):
            config.enable_p2p_compilation = True
        module.compile(**self.arguments)

    def begin_step(self) -> None:
        """Let CUDA graphs reuse the memory of the step before."""
        if self.replays_graphs:
            import torch

            torch.compiler.cudagraph_mark_step_begin()

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Say where the C++ compiler is missing, and what a mode cannot do."""
        yield from missing_compiler(self, cell)
        if self.replays_graphs:
            yield from self._graph_conflicts(cell)

    def _graph_conflicts(self, cell: "CellSpec") -> Iterator[str]:
        default = "Use `compilation.mode=default`."
        if cell.resources.device == "cpu":
            yield (
                "`compilation.mode=reduce_overhead` needs `resources.device=cuda`; got cpu, which has no "
                f"CUDA graphs. {default}"
            )
        if self.scope != "model":
            yield (
                f"`compilation.mode=reduce_overhead` with `compilation={self.name}` would replay a graph "
                "per block, whose results the next replay overwrites: use `compilation=compile_model`, "
                "or `compilation.mode=default`."
            )
        if cell.mesh.gradient_shares > 1:
            yield (
                f"`compilation.mode=reduce_overhead` with `sharding={cell.sharding.name}` on "
                f"{cell.mesh.gradient_shares} ranks fails in torch, whose graphs cannot hold the exchange of "
                f"gradients (pytorch#128218). {default}"
            )
        if cell.batch.accumulation_steps > 1:
            yield (
                "`compilation.mode=reduce_overhead` keeps gradients in memory that the next replay "
                f"overwrites, and `batch.accumulation_steps={cell.batch.accumulation_steps}` adds to them. "
                f"{default}"
            )


@dataclass(frozen=True, kw_only=True)
class CompileBlocks(TorchCompile):
    """`torch.compile` of each block; all blocks share one compilation, which keeps it short."""

    scope: ClassVar[Literal["nothing", "block", "model"]] = "block"

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Compile every block in place: same modules, same names."""
        from vitsweep.model.block import blocks_of

        for block in blocks_of(model):
            self.compile(block)
        return model


@dataclass(frozen=True, kw_only=True)
class CompileModel(TorchCompile):
    """`torch.compile` of the model in one graph: fuses across blocks, compiles for long.

    Under `sharding=fsdp`, `zero2` and `hsdp` the hooks that gather each block's parameters cut the
    graph there: it is what `compile_blocks` is then, compiled block after block.
    """

    scope: ClassVar[Literal["nothing", "block", "model"]] = "model"

    def apply(self, model: "nn.Module") -> "nn.Module":
        """Compile the model in place: same module, same names."""
        self.compile(model)
        return model
