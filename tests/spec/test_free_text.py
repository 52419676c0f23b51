"""What of a cell that somebody else froze counts as free text: each field, from its annotation."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml

from tests.cells import entry
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.free_text import TARGET, free_text
from vitsweep.spec.from_yaml import Word, hints_of, target_class
from vitsweep.spec.menu import choices, conf_dir

HOSTILE = (
    "/tmp/../x",
    "os:system",
    "hf-hub:a/b",
    "a b;$(touch x)",
    "${oc.env:HOME}",
    "",
    "..",
    "é\n",
    "\x1b[2J",
)
NODES = {
    (group, choice): yaml.safe_load((conf_dir() / group / f"{choice}.yaml").read_text())
    for group, kind in hints_of(CellSpec).items()
    if group != "seed"
    for choice in choices(group)
}


def node_of(group: str, choice: str) -> dict[str, Any]:
    node: dict[str, Any] = NODES[group, choice]
    named = "name" in hints_of(class_of(group, node))
    return ({"name": choice} if named else {}) | {k: v for k, v in node.items() if k != "name" or v}


def class_of(group: str, node: dict[str, Any]) -> type:
    kind: type = hints_of(CellSpec)[group]
    return target_class(node, group) if TARGET in node else kind


def fields_of(group: str, choice: str) -> dict[str, Any]:
    return hints_of(class_of(group, NODES[group, choice]))


def test_what_the_menu_says_is_no_free_text() -> None:
    assert len(NODES) > 100
    found = {names: [*free_text({names[0]: node_of(*names)})] for names in NODES}
    assert {names: texts for names, texts in found.items() if texts} == {}
    assert [
        *free_text(
            entry(
                "sharding=zero1", "precision=O2", "data=synthetic_video", "model=video_vit_nano"
            ).tree
        )
    ] == []


def test_variables_of_ranks_are_free_text() -> None:
    tree = entry("runtime.variables={NCCL_ALGO:Ring,A:1}").tree
    assert [*free_text(tree)] == ["runtime.variables={'NCCL_ALGO': 'Ring', 'A': 1}"]


def test_text_in_any_field_of_any_class_is_named() -> None:
    """Generated from the annotations, so that a new field needs no line here."""
    path = HOSTILE[0]
    values = [*HOSTILE, [path], [[0, path]], {"a": path}, {"a": 1}, b"x", {1, 2}]
    by_class = {(group, class_of(group, node)): choice for (group, choice), node in NODES.items()}
    silent = []
    for (group, _), choice in by_class.items():
        for field in fields_of(group, choice) | {TARGET: str, "unknown": str}:
            for value in values:
                tree = {group: node_of(group, choice) | {field: value}}
                if not any(text.startswith(f"{group}.{field}=") for text in free_text(tree)):
                    silent.append((group, choice, field, value))
    assert silent == []
    assert [*free_text({"seed": "$(x)"})] == ["seed=$(x)"]
    assert [*free_text({"model": "x"})] == ["model=x"]


def test_numbers_flags_and_listed_texts_are_values() -> None:
    tree = entry(
        "measurement.prove=none", "seed=7", "loader=decoded_cache", "model.depth=3", "task=train"
    ).tree
    assert [*free_text(tree)] == []
    tree["resources"] = tree["resources"] | {"device": "cuda", "memory_gib_per_rank": 2.5}
    tree["model"] = tree["model"] | {"name": "vit_tiny"}
    assert [*free_text(tree)] == []
    assert [*free_text({"model": tree["model"] | {"name": "video_vit_nano"}})] == [
        "model.name=video_vit_nano"
    ]


def test_a_model_of_a_library_is_a_name_and_a_version_where_it_holds_no_path() -> None:
    node = node_of("model", "timm") | {
        "name": "vit_tiny_patch16_224.augreg",
        "version": "1.0.9+cu12",
    }
    assert [*free_text({"model": node})] == []
    for name in ("a/b", "hf-hub:x", "local-dir:/x"):
        assert [*free_text({"model": node | {"name": name}})] == [f"model.name={name}"]
    mixed = node | {"target": "os.system", "arguments": {"trust_remote_code": True}, "loss": "a.b"}
    assert [text.partition("=")[0] for text in free_text({"model": mixed})] == [
        "model.target", "model.arguments", "model.loss",
    ]  # fmt: skip


def parts(kind: Any) -> Iterator[Any]:
    """The types that an annotation consists of."""
    origin = get_origin(kind)
    if origin is Annotated:
        kind, *metadata = get_args(kind)
        yield from (m for m in metadata if isinstance(m, Word))
        yield from parts(kind)
    elif origin in (Union, types.UnionType, tuple, list, dict):
        yield origin
        for part in get_args(kind):
            yield from parts(part)
    else:
        yield origin or kind


KNOWN = {
    bool,
    int,
    float,
    type(None),
    Literal,
    str,
    Any,
    dict,
    tuple,
    list,
    Union,
    types.UnionType,
    Ellipsis,
}


def test_every_annotation_is_classified() -> None:
    """A type that `is_value` has not been thought of for is text: say here that this is meant."""
    found = {
        (group, field): {p for p in parts(kind) if not isinstance(p, Word)} - KNOWN
        for group, choice in NODES
        for field, kind in fields_of(group, choice).items()
    }
    assert {where: new for where, new in found.items() if new} == {}
    words = {
        p
        for g, c in NODES
        for kind in fields_of(g, c).values()
        for p in parts(kind)
        if isinstance(p, Word)
    }
    assert 0 < len(words) < 4


@pytest.mark.parametrize(
    "target", ["os.system", "vitsweep.spec.technique.Technique", "", None, 7, ["x"]]
)
def test_only_classes_of_the_group_on_the_menu_are_built(target: Any) -> None:
    node = node_of("precision", "O1") | {TARGET: target}
    assert any(text.startswith("precision._target_=") for text in free_text({"precision": node}))
    other = node_of("precision", "O1") | {TARGET: NODES["sharding", "ddp"][TARGET]}
    assert any(text.startswith("precision._target_=") for text in free_text({"precision": other}))
