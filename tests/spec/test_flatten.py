"""A spec as one row: every field is in it, once, under a name that nothing else has."""

import json
from dataclasses import fields

import pytest

from tests.builders import PLAIN
from tests.cells import GPU_NODE, cell, entry
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import RunRecord
from vitsweep.spec.cell_spec import GROUPS, CellSpec, flatten
from vitsweep.spec.from_yaml import title_of

CELLS = {
    "plain": cell(),
    "mixed": cell("precision=O2", "sharding=fsdp", "data=synthetic", "batch.scope=per_replica"),
    "gpu": cell("precision=O1", "optimizer=adamw_contiguous", machine=GPU_NODE),
}


@pytest.mark.parametrize("spec", CELLS.values(), ids=CELLS)
def test_every_field_of_a_spec_is_a_column(spec: CellSpec) -> None:
    row = flatten(spec)
    assert row["seed"] == spec.seed
    for group in (f.name for f in fields(spec) if f.name not in ("seed", "objective")):
        part = getattr(spec, group)
        for field in (f.name for f in fields(part) if not f.metadata.get("derived")):
            column = group if field == "name" else f"{group}.{field}"
            assert row[column] == getattr(part, field), column


@pytest.mark.parametrize("spec", CELLS.values(), ids=CELLS)
def test_columns_are_plain_values_that_survive_json(spec: CellSpec) -> None:
    assert json.loads(json.dumps(flatten(spec))) == flatten(spec)


def test_no_column_of_a_spec_is_one_of_another_part_of_the_record() -> None:
    head = {f.name for f in fields(RunRecord)}
    for spec in CELLS.values():
        assert not flatten(spec).keys() & (METRICS.keys() | head)


def test_the_columns_people_filter_by_come_first_and_say_what_ran() -> None:
    row = flatten(cell("precision=O1", "sharding=fsdp", "batch.accumulation_steps=2"))
    assert list(row)[: len(GROUPS)] == list(GROUPS)
    assert (row["precision"], row["sharding"], row["model"]) == ("O1", "fsdp", "vit_nano")
    assert row["half_dtype"] == "bfloat16"
    assert (row["images_per_step"], row["accumulation_steps"], row["world_size"]) == (16, 2, 2)
    assert (row["resolution_px"], row["num_tokens"]) == (8, 17)
    assert row["mesh.shard"] == 2


def test_images_per_step_are_the_total_over_all_ranks() -> None:
    row = flatten(cell("batch.images_per_step=6", "batch.scope=per_replica"))
    assert row["images_per_step"] == 12
    assert row["batch.images_per_step"] == 6


def test_a_precision_without_a_half_has_none() -> None:
    assert flatten(cell())["half_dtype"] is None


def test_tables_are_tested_with_columns_that_a_cell_has() -> None:
    mixed = flatten(cell("precision=O2"))
    assert set(PLAIN) <= mixed.keys()


@pytest.mark.parametrize(
    ("name", "target", "title"),
    [
        ("module", "my.nets.PatchTransformer", "PatchTransformer"),
        ("module", "my.nets.build_model", "nets.build_model"),
        ("module", None, "module"),
        ("module", "no path", "module"),
        ("own", "my.nets.PatchTransformer", "own"),
    ],
)
def test_a_model_of_the_users_is_called_by_what_it_calls(name, target, title):
    assert title_of(name, target) == title


def test_a_row_names_the_class_or_function_of_a_model_and_of_data():
    spec = entry(
        "model=module", "model.target=tests.user_modules.build", "data=module",
        "data.target=tests.user_data.MapStyle",
    ).spec  # fmt: skip
    row = flatten(spec)
    assert (row["model"], row["data"]) == ("user_modules.build", "MapStyle")
    assert (spec.model.name, spec.data.name) == ("module", "module")
