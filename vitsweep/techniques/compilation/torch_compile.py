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
        """Compile a module in place, with the sends and receives of LASP inside its graph."""
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
        command = os.environ.get("CXX", "g++")  # what TorchInductor calls
        if cell.resources.device == "cpu" and shutil.which(shlex.split(command)[0]) is None:
            yield (
                f"`compilation={self.name}` needs a C++ compiler on cpu; found no `{command}`. "
                "Install one (Debian: `apt-get install g++`), name it in CXX, or use "
                "`compilation=eager`."
            )
        if self.replays_graphs:
            # torch's graphs cannot hold the exchange of gradients (pytorch#128218), nor sums of
            # them; a graph per block would overwrite the results of the block before
            ranks, steps = cell.mesh.gradient_shares, cell.batch.accumulation_steps
            unfit = {
                "`resources.device=cpu`": cell.resources.device == "cpu",
                f"`compilation={self.name}`": self.scope != "model",
                f"`sharding={cell.sharding.name}` on {ranks} ranks": ranks > 1,
                f"`batch.accumulation_steps={steps}`": steps > 1,
            }
            if found := [words for words, is_unfit in unfit.items() if is_unfit]:
                yield (
                    "`compilation.mode=reduce_overhead` replays a graph of the whole model on one GPU, which "
                    f"does not go with {' and '.join(found)}: use `compilation.mode=default`."
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
