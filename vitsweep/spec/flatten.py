"""A spec as one flat row: choice names under their group, fields dotted below them."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from vitsweep.spec.cell_spec import CellSpec

GROUPS_WITH_NAME = ("model", "data", "task", "recipe", "batch", "measurement")


def flatten(cell: CellSpec) -> dict[str, Any]:
    """Return the spec as columns of the record, the ones people filter by first."""
    choices = {group: technique.name for group, technique in cell.techniques.items()}
    named = {group: getattr(cell, group).name for group in GROUPS_WITH_NAME}
    plain = {
        "half_dtype": getattr(cell.precision, "half_dtype", None),
        "images_per_step": cell.images_per_step,
        "accumulation_steps": cell.batch.accumulation_steps,
        "resolution_px": cell.batch.resolution_px,
        "num_tokens": cell.num_tokens,
        "nodes": cell.resources.nodes,
        "ranks_per_node": cell.resources.ranks_per_node,
        "world_size": cell.resources.world_size,
        "seed": cell.seed,
    }
    dotted = {
        key: value
        for group in (f.name for f in fields(cell) if f.name != "seed")
        for part in [getattr(cell, group)]
        for field in fields(part)
        if field.name != "name" and not field.metadata.get("derived")
        for key, value in _spread(f"{group}.{field.name}", getattr(part, field.name))
    }
    return choices | named | plain | {k: _plain(v) for k, v in dotted.items()}


def _spread(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a column for each key of a mapping, and for any other value one."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _spread(f"{key}.{name}", part)
    else:
        yield key, value


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
