"""Which choices are traced as another one, and which cannot be traced at all (no torch)."""

from dataclasses import replace

from vitsweep.errors import VitsweepError
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Compilation
from vitsweep.techniques.attention.flex import Flex
from vitsweep.techniques.attention.sdpa import ScaledDotProduct
from vitsweep.techniques.memory.offload_activations import OffloadActivations
from vitsweep.techniques.memory.recompute import RecomputeByBudget
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.techniques.optimizer.apex_adamw import ApexAdamW
from vitsweep.techniques.optimizer.compact_adamw import CompactAdamW


class NotTraceableError(VitsweepError):
    """A cell has a choice that fake tensors cannot stand for."""


def traceable(cell: CellSpec) -> tuple[CellSpec, tuple[str, ...]]:
    """Replace choices that only a GPU or a compiler has by those with the same sizes.

    Returns:
        The cell to trace, and one sentence for each replacement.
    """
    notes = []
    if cell.compilation.scope != "nothing":
        notes.append(
            f"`compilation={cell.compilation.name}` is counted as the eager step: a compiler keeps "
            "fewer intermediate results."
        )
        cell = replace(cell, compilation=Compilation(name="eager"))
    if isinstance(cell.memory, RecomputeByBudget):
        notes.append(
            f"`memory={cell.memory.name}` is counted with all activations: how many are kept is known "
            "once the step is compiled."
        )
    if isinstance(cell.memory, OffloadActivations):
        notes.append(
            f"`memory={cell.memory.name}` is counted with copies at the speed of the device's memory: "
            "where the link to the host is the limit, the step takes longer."
        )
    if isinstance(cell.attention, Flex):
        notes.append(f"`attention={cell.attention.name}` is counted as flash attention.")
        cell = replace(
            cell, attention=ScaledDotProduct(name="sdpa_auto", backend="auto", flash_kernel="torch")
        )
    if isinstance(cell.attention, ScaledDotProduct) and cell.attention.backend != "math":
        cell = replace(
            cell, attention=replace(cell.attention, backend="auto", flash_kernel="torch")
        )  # all are fused
    if isinstance(cell.optimizer, ApexAdamW):
        notes.append(f"`optimizer={cell.optimizer.name}` is counted as PyTorch's fused AdamW.")
        same = ("learning_rate", "weight_decay", "clip_norm", "beta1", "beta2", "eps")
        knobs = {name: getattr(cell.optimizer, name) for name in same}
        cell = replace(cell, optimizer=AdamW(name="adamw_fused", implementation="fused", **knobs))
    if isinstance(cell.optimizer, CompactAdamW) and cell.optimizer.compiled:
        notes.append(
            f"`optimizer={cell.optimizer.name}` is counted as the update without a compiler, which passes "
            "over memory once per operation."
        )
        cell = replace(cell, optimizer=replace(cell.optimizer, compiled=False))
    return cell, tuple(notes)
