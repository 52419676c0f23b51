"""What decides the id of a cell, and which parts of a cell came later than others."""

from dataclasses import Field, fields, is_dataclass
from typing import Any

LATER = "value_before"
DERIVED = {"derived": True, "identity": False}
"""Metadata of a field that techniques set, and nobody types."""


def added_later(before: Any) -> dict[str, Any]:
    """Return the metadata of a field that cells of earlier versions do not have.

    Args:
        before: the value that stands for what these cells did. With it a cell keeps the id that it had,
            and a configuration without the field has it. A group's choice is given as its YAML:
            `{"_target_": ..., "name": ...}`.
    """
    return {LATER: before}


def value_before(field: Field[Any]) -> tuple[bool, Any]:
    """Return whether a field was added later, and its value in cells from before."""
    return LATER in field.metadata, field.metadata.get(LATER)


def identity(spec: Any) -> dict[str, Any]:
    """Return names and values that decide what is measured, class names included.

    The class name matters: two precisions without fields would otherwise be one cell. Fields that were
    added later are left out where they stand for what was done before.
    """
    named = {}
    for field in fields(spec):
        if not field.metadata.get("identity", True):
            continue
        value = getattr(spec, field.name)
        value = identity(value) if is_dataclass(value) else value
        later, before = value_before(field)
        if not (later and value == _as_identity(before)):
            named[field.name] = value
    return {"kind": type(spec).__name__} | named


def _as_identity(before: Any) -> Any:
    if isinstance(before, dict) and "_target_" in before:
        kind = before["_target_"].rpartition(".")[2]
        return {"kind": kind} | {k: v for k, v in before.items() if k != "_target_"}
    return before
