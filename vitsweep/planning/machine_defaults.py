"""What follows from the machine where nothing is typed: sizes, precision, and the part of a named sweep.

The group `machine` holds sizes and precision; `sweep.by_machine` of a named sweep holds its parts. Cells name
what they get from here among their overrides, so that they are the same cells wherever these are typed.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from annotated_types import Gt, Le

from vitsweep.composition.composer import BASELINE, ComposedCell, Composer, Tree, root_of
from vitsweep.composition.grid import AUTO, baseline_settings, expand, merge_overrides, named
from vitsweep.composition.hydra import key_of, unknown_choice, value_override
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.errors import BadValueError
from vitsweep.planning.closed_memory import Sizes, memory
from vitsweep.planning.sweep_plan import SweepPlan, plan_of
from vitsweep.rates.profile import device_name, free_gpu_gib
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import section_from_tree
from vitsweep.spec.menu import choices, comment
from vitsweep.spec.resources import HERE, Machine

GROUP = "machine"
FOR_CPUS = "_nano"
"""Ending of the models that a CPU trains in minutes."""
LARGE_DATA = ("synthetic", "image_folder")
"""Data with which the models of a GPU are trained where nothing else is typed."""
OF_THE_BATCH = ("batch", "batch.images_per_step", "batch.scope")
FLOAT32 = ("fp32", "O0", "tf32")
"""Precisions of float32: who names one has chosen whether TF32 is used."""
Says = Callable[[SweepPlan], str]
"""Returns what follows from the machine, of the plan of the cells, in a sentence; "" where nothing does."""


@dataclass(frozen=True, kw_only=True)
class MachineSizes:
    """A choice of the group `machine`; `conf/machine` explains each field."""

    name: str
    models: tuple[str, ...]
    data: str | None
    images_per_rank: tuple[Annotated[int, Gt(0)], ...]
    memory_share: Annotated[float, Gt(0), Le(1)]
    precision: str | None


def machine_sizes(node: Mapping[str, Any]) -> MachineSizes:
    """Type and check the node `machine` of a composed configuration.

    Raises:
        BadValueError: a value is not allowed.
    """
    sizes: MachineSizes = section_from_tree(MachineSizes, node, GROUP)
    return sizes


@dataclass(frozen=True)
class _Typed:
    """What one command types, and the machine that it is for.

    Attributes:
        composer: composes cells.
        overrides: those of cells and of the sweep.
        machine: node on which the cells will run.
        sizes: the choice of `machine`.
    """

    composer: Composer
    overrides: list[str]
    machine: Machine
    sizes: MachineSizes


def cells_for(
    overrides: Sequence[str],
    composer: Composer,
    machine: Machine,
    say: Callable[[str], object] = lambda said: None,
) -> tuple[list[ComposedCell], Tree, Says]:
    """Return the cells of a command line on a machine.

    Args:
        overrides: as typed after `python -m vitsweep -m`, without those of Hydra's own node.
        composer: composes cells.
        machine: node on which they will run.
        say: see `expand`.

    Returns:
        The cells; the node `sweep` of the command; what says what follows from the machine.

    Raises:
        BadValueError: an override is wrong.
    """
    typed = _typed(overrides, composer, machine)
    parts: list[tuple[Tree, bool]] = []

    def part(sweep: Tree) -> Tree:
        parts.append(_part(sweep, typed))
        return parts[-1][0]

    cells = expand(typed.overrides, composer, part, say)
    sized, too_large = _sized(cells, typed)
    [(sweep, has_part)] = parts
    chosen, precision = _with_precision(sized, typed)
    sweep = sweep | {key: chosen[0].tree["sweep"][key] for key in ("name", "baseline")}
    follows = has_part or sized is not cells
    others = ("" if follows else _for_cpus(cells, typed), precision)
    return chosen, sweep, partial(_sentence, typed if follows else None, too_large, others)


def _for_cpus(cells: Sequence[ComposedCell], typed: _Typed) -> str:
    """Say that a named sweep has the sizes of CPUs on a machine with GPUs; "" where it has not."""
    name = next((t.split("=")[1] for t in typed.overrides if key_of(t) == "sweep" and "=" in t), "")
    models = {cell.choices.get("model", "") for cell in cells}
    if not (name and typed.sizes.models and all(m.endswith(FOR_CPUS) for m in models)):
        return ""
    large = f"{name}_cluster"
    other = f"; for GPUs: `+sweep={large}`" if large in typed.composer.options("sweep") else ""
    return f"`+sweep={name}` has the sizes of CPUs, {', '.join(sorted(models))}{other}"


def with_sizes(
    cells: list[ComposedCell], overrides: Sequence[str], composer: Composer, machine: Machine
) -> tuple[list[ComposedCell], Says]:
    """Return composed cells with sizes and precision of a machine, and what says them, see `cells_for`.

    Args:
        cells: of one command.
        overrides: that were typed for any of them.
        composer: composes cells.
        machine: node on which they will run.
    """
    typed = _typed(overrides, composer, machine)
    sized, too_large = _sized(cells, typed)
    chosen, precision = _with_precision(sized, typed)
    follows = sized is not cells
    return chosen, partial(_sentence, typed if follows else None, too_large, (precision,))


def _typed(overrides: Sequence[str], composer: Composer, machine: Machine) -> _Typed:
    """Tell the overrides of `machine` from the others, and choose where none is typed."""
    parsed = dict(zip(overrides, composer.parse(overrides), strict=True))
    own = [text for text, override in parsed.items() if root_of(override) == GROUP]
    for text in own:
        if parsed[text].is_sweep_override():
            raise BadValueError(
                f"`{text}` cannot be swept: it says what the defaults of all cells are."
            )
    rest = [text for text in overrides if text not in own]
    device = "cpu" if "resources.device=cpu" in rest else machine.device
    composed = composer.compose([f"{GROUP}={device}", *own])
    sizes = machine_sizes(composed.tree[GROUP])
    if own and own != [f"{GROUP}={sizes.name}"] and not sizes.models:
        raise BadValueError(
            f"`{' '.join(own)}` changes no cell: `{GROUP}={sizes.name}` leaves sizes to `config.yaml`. Type "
            f"`{GROUP}=cuda` too, or a size itself, such as `batch.images_per_step=64`."
        )
    return _Typed(composer, rest, machine, sizes)


# The part of a named sweep.


def _part(sweep: Tree, typed: _Typed) -> tuple[Tree, bool]:
    """Return the node `sweep` with what its part for the machine replaces, and whether it has one."""
    keys = {key_of(text) for text in typed.overrides} - {BASELINE}  # of which sizes stay
    for name in sweep_settings({"sweep": sweep}).by_machine:
        if name not in typed.composer.options(GROUP):
            raise unknown_choice(GROUP, name, typed.composer.options(GROUP))
    part: Tree = sweep["by_machine"].get(typed.sizes.name, {})
    is_told = any("tf32" in text for text in typed.overrides if key_of(text).startswith(BASELINE))
    if typed.machine.has_tf32 is False or not (typed.machine.has_tf32 or is_told):
        part = {key: node if key == "question" else _in_fp32(node) for key, node in part.items()}
    if _ranks(typed) == 1 and "cells" in part:
        # one rank has nothing to share, and all cells get the baseline's sharding
        lists = [shlex.split(cell) if isinstance(cell, str) else cell for cell in part["cells"]]
        kept = [tuple(text for text in cell if text != "sharding=fsdp") for cell in lists]
        part = part | {"cells": [list(cell) for cell in dict.fromkeys(kept) if cell]}
    found = sweep | {k: value for k, value in part.items() if f"sweep.{k}" not in keys}
    has_name = sweep["name"] != AUTO and "sweep.name" not in keys
    if has_name and typed.sizes.models and ("cells" in part or "model" not in sweep["axes"]):
        found["name"] = f"{sweep['name']}-{typed.sizes.name}"
    return found | {"by_machine": {}}, bool(part)


def _in_fp32(node: Any) -> Any:
    """Return a node with `fp32` wherever it chooses the precision `tf32`."""
    if isinstance(node, Mapping):
        return {key: _in_fp32(value) for key, value in node.items()}
    if isinstance(node, str):
        return re.sub(r"(?<!\S)(precision=)?tf32(?!\S)", r"\1fp32", node)
    return [*map(_in_fp32, node)] if isinstance(node, Sequence) else node


def _ranks(typed: _Typed) -> int:
    """Return the ranks of all cells if they have equally many, else 0."""
    values = dict(text.split("=", 1) for text in typed.overrides if text.startswith("resources."))
    nodes = values.get("resources.nodes", "1")
    ranks = values.get("resources.ranks_per_node", str(typed.machine.devices_per_node))
    return int(nodes) * int(ranks) if nodes.isdecimal() and ranks.isdecimal() else 0


# Model, data and images per rank.


def _sized(cells: list[ComposedCell], typed: _Typed) -> tuple[list[ComposedCell], str]:
    """Return the cells with the sizes of the machine where nobody set them, and why not a larger model's."""
    sizes = typed.sizes
    too_large: list[str] = []
    for model in sizes.models:
        added = list(_added(cells, typed, model))
        if not added:
            break
        counts = sizes.images_per_rank if added[-1] == "batch.scope=per_replica" else (None,)
        try:
            plan = plan_of(_with(cells, added, typed.composer), typed.machine, typed.composer)
            specs = [entry.spec for entry in plan.runnable]
        except BadValueError:  # a value is wrong, which is reported later
            specs = []
        free = free_gpu_gib() if typed.machine.described_by == HERE else typed.machine.least_gib
        usable = sizes.memory_share * (free or 0)
        for images in counts:
            needed = _gib(specs, images) if free else None
            fits = needed is not None and needed <= usable
            is_last = images == counts[-1] and (needed is None or model == sizes.models[-1])
            if is_last and needed is not None and not fits:
                too_large.append(
                    f"the largest cell needs {needed:.0f} GiB of {usable:.0f} usable and may not fit"
                )
            if fits or is_last:
                texts = [f"batch.images_per_step={images}"] if images else []
                return _with(cells, [*added, *texts], typed.composer), ", ".join(too_large)
        if added[0] == f"model={model}":
            too_large.append(f"{_title(model)} needs {needed:.0f} GiB of {usable:.0f} usable")
    return cells, ""


def _added(cells: Sequence[ComposedCell], typed: _Typed, model: str) -> Iterator[str]:
    """Yield the overrides of the machine for keys that neither the command nor its sweep sets."""
    values: dict[str, set[str]] = {}
    for text in (text for cell in cells for text in cell.overrides):
        values.setdefault(key_of(text), set()).add(text.partition("=")[2])
    is_typed = "model" in {key_of(text) for text in typed.overrides}
    models = values.get("model", set())
    if models and not (is_typed and all(not name.endswith(FOR_CPUS) for name in models)):
        return
    if not values.get("data", set()) <= {*LARGE_DATA} or "train" in values.get("task", ()):
        return
    if not models:
        yield f"model={model}"
    if "data" not in values and typed.sizes.data:
        yield f"data={typed.sizes.data}"
    is_searched = cells[0].tree["sweep"]["limit"]["key"] == "batch.images_per_step"
    if typed.sizes.images_per_rank and not is_searched and not values.keys() & {*OF_THE_BATCH}:
        yield "batch.scope=per_replica"


def _with(
    cells: Sequence[ComposedCell], added: Sequence[str], composer: Composer
) -> list[ComposedCell]:
    return named([composer.compose([*added, *cell.overrides]) for cell in cells], composer)


def _gib(specs: Sequence[CellSpec], images: int | None) -> float | None:
    """Return the GiB of the largest cell by the memory formula; None where it knows none."""
    if not all(spec.model.has_memory_formula for spec in specs):
        return None
    if images:
        specs = [replace(s, batch=replace(s.batch, images_per_step=images)) for s in specs]
    return max((memory(Sizes.of(spec)).peak / 2**30 for spec in specs), default=0.0)


# Precision.


def _with_precision(cells: list[ComposedCell], typed: _Typed) -> tuple[list[ComposedCell], str]:
    """Return the cells with the machine's precision where nobody chose one of float32, and what says it."""
    precision, composer = typed.sizes.precision, typed.composer
    is_default = composer.default_choices["precision"] == "fp32"
    if not (precision and typed.machine.has_tf32 and is_default):
        return cells, ""
    found = []
    for cell in cells:
        sweep, keys = cell.tree["sweep"], {key_of(text) for text in cell.overrides}
        baseline = baseline_settings(sweep["baseline"], composer)
        is_named = "precision" in keys
        if (
            (is_named and cell.choices["precision"] in FLOAT32)
            or any(key.startswith("precision.") for key in keys)
            or any(key.partition(".")[0] == "precision" for key in baseline)
            or "resources.device=cpu" in cell.overrides
        ):
            return cells, ""
        added: tuple[str, ...] = () if is_named else (f"precision={precision}",)
        if sweep["baseline"] is not None and "precision" not in sweep["match"]:
            baseline |= {"precision": precision}
            added += (value_override(BASELINE, baseline),)
        composed = composer.compose(merge_overrides([cell.overrides, added], composer))
        own = composed.tree["sweep"] | {"name": sweep["name"]}
        found.append(replace(composed, tree=composed.tree | {"sweep": own}))
    said = f"`precision={precision}` where none is named, `precision=fp32` for float32 without TF32"
    return found, said


# The line that says it.


def _sentence(typed: _Typed | None, too_large: str, others: Sequence[str], plan: SweepPlan) -> str:
    from vitsweep.tables.formatting import span  # pandas, for which no mistake waits

    specs = [entry.spec for entry in plan.runnable]
    if not typed or not specs:
        return "; ".join(filter(None, others))
    names = dict.fromkeys(_title(entry.composed.choices["model"]) for entry in plan.named)
    ranks = span((spec.resources.world_size for spec in specs), str)
    scope = ""
    if ranks != "1":
        scope = " per rank" if specs[0].batch.scope == "per_replica" else " in all"
    pixels = span((spec.batch.resolution_px for spec in specs), str)
    images = span((spec.batch.images_per_step for spec in specs), str)
    sizes = " or ".join(f"`{GROUP}={name}`" for name in choices(GROUP) if name != typed.sizes.name)
    said = (
        f"{ranks} x {_device(typed.machine)}: {', '.join(names)}, {pixels} px, {images} images{scope}"
        f"{f' ({too_large})' * bool(too_large)}; {sizes} chooses other sizes"
    )
    return "; ".join((said, *filter(None, others)))


def _title(model: str) -> str:
    """Return the name that the YAML of a model begins with, such as `ViT-B/16`."""
    name = comment("model", model).split(",")[0] if model in choices("model") else ""
    return name if name.startswith("ViT-") else model


def _device(machine: Machine) -> str:
    if machine.device == "cpu":
        return "CPU rank"
    if machine.described_by.startswith("partition"):
        return f"GPU of {machine.described_by}"
    here = machine.described_by == HERE
    name = (device_name("cuda") or "GPU") if here else machine.described_by
    return name.removeprefix("NVIDIA ").split(",")[0]
