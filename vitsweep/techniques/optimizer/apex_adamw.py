"""NVIDIA apex's FusedAdam: multi_tensor_apply in CUDA, in AdamW mode."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Lt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import OptimizerChoice, Technique
from vitsweep.techniques.optimizer.adamw import AdamW

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class ApexAdamW(OptimizerChoice):
    """apex.optimizers.FusedAdam with decoupled weight decay (`adam_w_mode`); arithmetic in float32.

    Attributes:
        beta1: decay of the mean gradient.
        beta2: decay of the mean squared gradient.
        eps: added to the root of the latter.
    """

    beta1: Annotated[float, Ge(0), Lt(1)]
    beta2: Annotated[float, Ge(0), Lt(1)]
    eps: Annotated[float, Gt(0)]

    compilable: ClassVar[bool] = False

    def build(self, groups: list[dict[str, Any]]) -> "Optimizer":
        """Return apex's optimizer; each group carries its own `weight_decay`."""
        from apex.optimizers import FusedAdam

        return FusedAdam(
            groups,
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            adam_w_mode=True,
        )

    def plain(self) -> AdamW:
        """Return torch's loop over parameters."""
        knobs = {field.name: getattr(self, field.name) for field in fields(self)}
        return AdamW(**knobs, implementation="loop")

    def trace_substitute(self) -> tuple[Technique, str]:
        """PyTorch's fused AdamW, which moves the same bytes."""
        fused = replace(self.plain(), name="adamw_fused", implementation="fused")
        return fused, f"`optimizer={self.name}` is counted as PyTorch's fused AdamW."

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """It needs NVIDIA's apex with its CUDA extensions, a GPU, and whole parameters."""
        if not apex_is_installed():
            yield (
                f"`optimizer={self.name}` needs NVIDIA's apex built with its CUDA extensions "
                "(github.com/NVIDIA/apex; the package `apex` on PyPI is something else): use "
                "`optimizer=adamw_fused`."
            )
        if cell.resources.device != "cuda":
            yield (
                f"`optimizer={self.name}` runs on GPUs only, and this cell has "
                f"`resources.device={cell.resources.device}`: use `optimizer=adamw_fused`."
            )
        if cell.sharding.shards_parameters:
            yield (
                f"`optimizer={self.name}` cannot update the shards of "
                f"`sharding={cell.sharding.name}` (its kernels know no DTensor): use "
                "`optimizer=adamw_fused`, or `sharding=ddp`."
            )


def apex_is_installed() -> bool:
    """Whether `apex.optimizers.FusedAdam` can be built, found out without importing torch."""
    package = find_spec("apex")
    roots = (package.submodule_search_locations if package else None) or ()
    fused_adam = any(Path(root, "optimizers", "fused_adam.py").is_file() for root in roots)
    return fused_adam and find_spec("amp_C") is not None
