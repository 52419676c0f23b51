"""The identity of a cell: everything that can change its numbers, and nothing else."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from typing import Any

import pytest

from tests.cells import GPU_NODE, cell, entry
from vitsweep.errors import BadValueError
from vitsweep.spec.cell_spec import CellSpec, identity
from vitsweep.spec.from_yaml import cell_from_tree

CELLS = {
    "plain": cell(),
    "mixed": cell("precision=O2", "sharding=fsdp", "optimizer=sgd_loop", "layout=batch_second"),
    "synthetic": cell("data=synthetic", "memory=recompute_blocks", "task=train"),
    "gpu": cell("precision=O1", "attention=sdpa_flash", machine=GPU_NODE),
}
FREE = {
    "model.computed_images",
    "model.kept_patches",
    "model.parallel_branches",
    "measurement.blocks",
    "measurement.max_seconds",
    "measurement.min_seconds",
    "measurement.prove",
    "measurement.start",
    "measurement.timeout_min",
    "measurement.trace",
    "measurement.traced_steps",
    "measurement.fewest_steps",
    "measurement.warmup_min_seconds",
    "resources.cores_per_node",
    "resources.device",
    "resources.devices_per_node",
    "task.checkpoint_minutes",
    "task.keep",
    "task.held_out",
}
"""Fields that say how sure a number is, or where it was measured, or that techniques set: no identity."""


def leaves(spec: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Field[Any]]]:
    """Every field of a spec that holds a value, with its path."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        here = (*path, field.name)
        if is_dataclass(value):
            yield from leaves(value, here)
        else:
            yield here, field


def other(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value + 0.125
        case str():
            return value + "x"
        case tuple():
            return (*value, 1)
        case None:
            return 1
    raise AssertionError(f"no other value of {value!r}")


def changed(spec: Any, path: tuple[str, ...]) -> Any:
    value = getattr(spec, path[0])
    return replace(spec, **{path[0]: changed(value, path[1:]) if path[1:] else other(value)})


@pytest.mark.parametrize("spec", CELLS.values(), ids=CELLS)
def test_every_field_is_part_of_the_identity_except_those_that_cannot_change_a_number(
    spec: CellSpec,
) -> None:
    ids = {".".join(path): changed(spec, path).cell_id for path, _ in leaves(spec)}
    assert len(ids) > 50
    assert {path for path, cell_id in ids.items() if cell_id == spec.cell_id} == FREE
    counting = [cell_id for path, cell_id in ids.items() if path not in FREE]
    assert len(set(counting)) == len(counting)


def test_fields_left_out_are_marked_so_where_they_are_declared() -> None:
    marked = {
        ".".join(p) for p, f in leaves(CELLS["plain"]) if not f.metadata.get("identity", True)
    }
    assert marked == FREE


@dataclass(frozen=True, kw_only=True)
class Exact:
    name: str


@dataclass(frozen=True, kw_only=True)
class Rough:
    name: str


@dataclass(frozen=True, kw_only=True)
class Pair:
    left: Exact | Rough
    count: int


def test_classes_without_fields_of_their_own_are_distinguished() -> None:
    one, two = (Pair(left=kind(name="x"), count=1) for kind in (Exact, Rough))
    assert identity(one) != identity(two)
    assert identity(one) == {"kind": "Pair", "left": {"kind": "Exact", "name": "x"}, "count": 1}


def test_an_identifier_does_not_depend_on_the_process_or_on_the_order_of_keys() -> None:
    code = "from tests.cells import cell; print(cell('precision=O2', 'sharding=fsdp').cell_id)"
    environment = os.environ | {"PYTHONHASHSEED": "77"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    spec = cell("precision=O2", "sharding=fsdp")
    assert done.stdout.strip() == spec.cell_id
    assert cell("sharding=fsdp", "precision=O2").cell_id == spec.cell_id


def test_a_cell_keeps_its_identifier_from_version_to_version() -> None:
    """Another value here makes every sweep measured before measure anew: never by accident."""
    assert cell().cell_id == "5d143df00341"


@pytest.mark.parametrize("override", ["vit_block=plain", "tokens=all", "model.registers=0"])
def test_a_default_that_is_typed_changes_no_identifier(override: str) -> None:
    assert cell(override).cell_id == cell().cell_id
    assert cell("vit_block=parallel").cell_id != cell("tokens=registers").cell_id != cell().cell_id


def test_a_key_that_is_left_out_is_refused_by_name() -> None:
    made = entry("sharding=fsdp")
    del made.tree["sharding"]["blocks_per_unit"]
    with pytest.raises(BadValueError, match=r"`sharding.blocks_per_unit` is missing"):
        cell_from_tree(made.tree)


def test_names_of_launchers_sweeps_and_trackers_are_no_part_of_a_cell() -> None:
    named = cell("sweep.name=other", "sweep.baseline=null", "tracker=wandb", "sweep.folder=/tmp/x")
    assert named.cell_id == cell().cell_id


def test_the_same_values_typed_or_chosen_by_auto_are_the_same_cell() -> None:
    typed = ["resources.ranks_per_node=2", "batch.resolution_px=8", "mesh.shard=1"]
    assert cell(*typed).cell_id == cell().cell_id


def test_a_frozen_tree_gives_the_cell_back() -> None:
    made = entry("precision=O2", "sharding=zero1")
    assert cell_from_tree(made.tree) == made.spec
