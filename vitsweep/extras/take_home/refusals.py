"""Which cells cannot be written as plain PyTorch, by the names of their techniques (no torch)."""

from collections.abc import Iterator

from vitsweep.model.module_spec import ModuleSpec
from vitsweep.spec.cell_spec import GROUPS, CellSpec
from vitsweep.spec.from_yaml import targets_in
from vitsweep.spec.model_spec import ViTSpec
from vitsweep.spec.technique import Compilation, Memory, Runtime
from vitsweep.techniques.attention.sdpa import ScaledDotProduct
from vitsweep.techniques.compilation.torch_compile import CompileBlocks, CompileModel
from vitsweep.techniques.memory.recompute import (
    RecomputeBlocks,
    RecomputeSelected,
)
from vitsweep.techniques.optimizer.adamw import AdamW
from vitsweep.techniques.optimizer.sgd import SGD
from vitsweep.techniques.precision.full import FullPrecision
from vitsweep.techniques.precision.opt_level import OptLevel
from vitsweep.techniques.sharding.ddp import Ddp
from vitsweep.techniques.sharding.fsdp import Fsdp, Hsdp
from vitsweep.techniques.sharding.none import Unsharded

WRITTEN = {
    "precision": (OptLevel, FullPrecision),
    "sharding": (Unsharded, Ddp, Fsdp, Hsdp),
    "optimizer": (AdamW, SGD),
    "memory": (Memory, RecomputeBlocks, RecomputeSelected),
    "attention": (ScaledDotProduct,),
    "runtime": (Runtime,),
    "compilation": (Compilation, CompileBlocks, CompileModel),
}
"""Group -> classes of choices that a template is there for; their subclasses do something else.

Of other groups the default choice alone is written.
"""
WHOLLY_WRITTEN = ("layout", "classifier", "loader")
"""Groups of which every choice is written."""


def refusals(cell: CellSpec) -> list[str]:
    """Return one sentence for each thing of a cell that is no plain PyTorch."""
    way_out = "use `vitsweep.apply(cell, model)`, which trains with it."
    typed = [f"`{each}` is" for each in _typed(cell)]
    if isinstance(cell.model, ModuleSpec) and cell.model.twin_batch:
        typed.append(f"Items that are dicts (`model.twin_batch={cell.model.twin_batch}`) are")
    return [f"{each} not written as plain PyTorch: {way_out}" for each in typed]


def _typed(cell: CellSpec) -> Iterator[str]:
    for group, plain in GROUPS.items():
        choice = getattr(cell, group)
        if group not in WHOLLY_WRITTEN and type(choice) not in WRITTEN.get(group, (plain,)):
            yield f"{group}={choice.name}"
    yield from _knobs(cell)
    yield from _of_model(cell)
    if cell.loss_count:
        yield f"objective.count={cell.loss_count}"
    if not (cell.objective.is_default or cell.loss_function):
        yield f"objective={cell.objective.name}"
    if cell.task.epochs:
        yield f"task={cell.task.name}"
    elif smoothing := cell.task.label_smoothing:
        yield f"task.label_smoothing={smoothing}"


_OF_SHARDING = (*("gradient_dtype", "blocks_per_unit", "prefetch_forward", "prefetch_backward"),)


def _knobs(cell: CellSpec) -> Iterator[str]:
    for knob in _OF_SHARDING:
        value = getattr(cell.sharding, knob, None)
        if knob == "gradient_dtype" and isinstance(cell.sharding, Fsdp):
            continue
        if value and not (knob == "blocks_per_unit" and value == 1):
            yield f"sharding.{knob}={str(value).lower() if value is True else value}"
    if getattr(cell.attention, "backend", None) == "cudnn_first":
        yield f"attention={cell.attention.name}"


def _of_model(cell: CellSpec) -> Iterator[str]:
    model = cell.model
    if isinstance(model, ModuleSpec):
        for target in targets_in(model.arguments):
            yield f"model.arguments with _target_: {target}"
        if model.seams and cell.attention.name != "sdpa_auto":
            yield f"attention={cell.attention.name}"
        return
    if not isinstance(model, ViTSpec):
        yield f"model={model.name}"
        return
    for knob, plain in (
        ("registers", 0),
        ("layer_scale", None),
        ("mlp", "gelu"),
    ):
        value = getattr(model, knob)
        if value != plain:
            yield f"model.{knob}={str(value).lower()}"
