"""The cell that `vitsweep.apply` is asked for, for as many ranks as there are, and fitted to a model."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from vitsweep.api.session import Overrides, as_overrides, refuse_second
from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.composition.hydra import key_of
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.execution.run_request import read_cell
from vitsweep.foreign import MOST_YAML_BYTES, parsed_yaml
from vitsweep.job_environment import environment_rank, ranks_per_node
from vitsweep.model.module_spec import ModuleSpec
from vitsweep.results.provenance import is_own_text, require_trust
from vitsweep.results.sweeps import find_sweep
from vitsweep.spec.cell_spec import OPTIMIZER_FIELDS, CellSpec
from vitsweep.spec.free_text import free_text
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.spec.menu import conf_dir, plain_choice
from vitsweep.spec.resolve import resolve
from vitsweep.spec.resources import Machine

if TYPE_CHECKING:
    from pandas import Series
    from torch import nn

Cell: TypeAlias = "CellSpec | os.PathLike[str] | Mapping[str, Any] | Series | Overrides"
"""What names a cell: a row of a table, the path of a frozen `cell.yaml`, or overrides, also as a dict."""
RANKS = {"resources.nodes": "nodes", "resources.ranks_per_node": "ranks_per_node"}


def place() -> tuple[int, int, int]:
    """Return rank, local rank and number of ranks, of a process group that exists or of the launcher."""
    import torch.distributed as dist

    place = environment_rank() or (0, 0, 1)
    if not dist.is_initialized():
        return place
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, place[1] if place[2] == size else rank, size


def spec_of(cell: Cell, config_dir: str | Path | None) -> CellSpec:
    """Return the cell that was named, for as many ranks as there are.

    Raises:
        VitsweepError: it is for another number of ranks.
        BadValueError: it cannot be read.
    """
    size = place()[2]
    spec = _read(cell, size, config_dir)
    if spec.resources.world_size != size:
        names = {group: technique.name for group, technique in spec.techniques.items()}
        typed = [f"{g}={name}" for g, name in names.items() if name != plain_choice(g)]
        raise VitsweepError(
            f"The cell is for {spec.resources.world_size} ranks (`resources.nodes={spec.resources.nodes} "
            f"resources.ranks_per_node={spec.resources.ranks_per_node}`), and there are {size}: start "
            "that many with torchrun or srun, or give its techniques as overrides, such as "
            f"`{' '.join(typed) or 'sharding=ddp'}`, with the settings that you gave them."
        )
    return spec


def _read(cell: Cell, size: int, config_dir: str | Path | None) -> CellSpec:
    if isinstance(cell, CellSpec):
        return cell
    if _is_file(cell):
        try:
            with Path(cell).open(encoding="utf-8") as file:
                text = file.read(MOST_YAML_BYTES + 1)
            tree = parsed_yaml(text)["cell"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadValueError(
                f"`{cell}` is no frozen cell ({type(error).__name__}: {error}): give the `cell.yaml` in "
                "`results/SWEEP/cells/CELL_ID/`, or where the sweep was packed a row of `cells.parquet`."
            ) from error
        if not is_own_text(text):
            require_trust(cell, free_text(tree))
        return cell_from_tree(tree)
    if _is_row(cell):
        row: Any = cell
        if missing := [key for key in ("sweep", "cell_id") if key not in row]:
            raise BadValueError(
                f"The row has no `{missing[0]}`: give a row of `cells.parquet`, the path of a `cell.yaml`, "
                "or overrides."
            )
        try:
            store = find_sweep(str(row["sweep"]))
        except VitsweepError as error:
            raise VitsweepError(
                f"{error} In another folder give the path of the cell's `cell.yaml` instead of its row."
            ) from error
        return read_cell(store, str(row["cell_id"]))
    composer, texts = Composer(hydra.open_loader(conf_dir(), config_dir)), typed(cell)
    for number, override in enumerate(composer.parse(texts)):
        refuse_second(texts[:number], texts[number])
        if override.is_sweep_override():
            raise BadValueError(
                f"`{override.input_line}` has several values, and `vitsweep.apply` takes one: give one of "
                "them, or several cells to `vitsweep.tune`."
            )
    composed = composer.compose(texts)
    resources, per_node = composed.tree["resources"], ranks_per_node(size)
    if not {*RANKS} & {*map(key_of, texts)}:
        resources = resources | dict(zip(RANKS.values(), (size // per_node, per_node), strict=True))
    return cell_from_tree(resolve(composed.tree | {"resources": resources}, Machine.here()))


def typed(cell: Cell) -> list[str]:
    """Return the overrides that name a cell; [] where a row, a file or another cell does."""
    if isinstance(cell, CellSpec) or _is_file(cell) or _is_row(cell):
        return []
    overrides: Any = cell
    return as_overrides([], overrides) if isinstance(cell, Mapping) else as_overrides(overrides, {})


def _is_file(cell: Any) -> TypeGuard["str | os.PathLike[str]"]:
    is_named = isinstance(cell, str) and cell.endswith((".yaml", ".yml"))
    return is_named or isinstance(cell, os.PathLike)


def _is_row(cell: Any) -> bool:
    """Whether it is a row of a table; a mapping without a sweep is one of settings."""
    is_mapping = hasattr(cell, "keys") and not isinstance(cell, str)
    return is_mapping and not (isinstance(cell, dict) and not {"sweep", "cell_id"} & cell.keys())


def without_effect(cell: Cell, spec: CellSpec, model: "nn.Module") -> list[str]:
    """Return the overrides that change nothing of a training with a loop and a model of one's own."""
    from vitsweep.model.block import Network

    is_own = not isinstance(model, Network) and not isinstance(spec.model, ModuleSpec)

    def is_idle(key: str) -> bool:
        group, _, name = key.partition(".")
        return (
            group in ("sweep", "measurement", "tracker", "metric", "machine")
            or (group == "batch" and name != "accumulation_steps")
            or (group == "task" and name not in ("", "label_smoothing"))
            or (group == "recipe" and name not in ("", "label_smoothing", *OPTIMIZER_FIELDS))
            or (group == "model" and is_own and name not in ("num_classes", "in_channels"))
        )

    return [text for text in typed(cell) if is_idle(key_of(text))]


def for_model(cell: CellSpec, model: "nn.Module") -> CellSpec:
    """Return the cell with a description of the model that is given.

    Raises:
        VitsweepError: it is a model of vitsweep's of another shape.
    """
    from vitsweep.model.block import Network

    if isinstance(model, Network):
        if model.spec != cell.shape:
            raise VitsweepError(
                f"The model is a {type(model).__name__} of {model.spec}, and the cell has {cell.shape}: "
                "build it with `vitsweep.model.build.build_model(cell)`."
            )
        return cell
    known = described(cell, f"{type(model).__module__}.{type(model).__qualname__}")
    return replace(cell, model=replace(known, name=type(model).__name__, passes_name=False))


def described(cell: CellSpec, target: str) -> ModuleSpec:
    """Return the cell's description of a module, or one of a module that it says nothing of."""
    if isinstance(cell.model, ModuleSpec):
        return cell.model
    return ModuleSpec(
        name=target,
        in_channels=cell.model.in_channels,
        num_classes=cell.model.num_classes,
        target=target,
        arguments={},
        shape_arguments={},
        passes_name=False,
        blocks="auto",
        output=None,
        seams=(),
        twin_arguments={},
        twin_side_px=None,
        package=None,
        version=None,
    )
