"""What of a cell that somebody else froze is free text: all but values and names of the installed menu.

Whatever text names (a function, a folder, an argument) is called, read or written by who runs the cell.
Bool, int, float, None and the texts that a `Literal` lists are values; a choice of `conf/` is a name.
Everything else is text: other strings, mappings, and what nobody has classified.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.from_yaml import Word, hints_of, target_class
from vitsweep.spec.menu import choices, content_of

TARGET = "_target_"


def free_text(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield `key=value` of each free text in the frozen tree of a cell that is not the menu's own."""
    for group, kind in hints_of(CellSpec).items():
        node = tree.get(group)
        if not isinstance(node, Mapping):
            if not is_value(kind, node):
                yield f"{group}={node}"
            continue
        choice = choice_of(group, node)
        content = content_of(group, choice) if choice else {}
        if choice is None:
            yield f"{group}.{TARGET}={node.get(TARGET)}"
        cls = target_class(content, group) if TARGET in content else kind
        hints = hints_of(cls) if choice else {}
        for key, value in node.items():
            is_name = key == "name" and value == choice
            if key == TARGET or is_name or is_value(hints.get(key), value):
                continue
            if key not in content or content[key] != value:
                yield f"{group}.{key}={value}"


def choice_of(group: str, node: Mapping[str, Any]) -> str | None:
    """Return the choice of the menu that filled a node, by class and name, else the most alike; or None."""
    named = {choice: content_of(group, choice) for choice in choices(group)}
    alike = {c: content for c, content in named.items() if content.get(TARGET) == node.get(TARGET)}
    name = node.get("name")
    if isinstance(name, str) and name in alike:
        return name
    return max(
        alike, key=lambda c: sum(node.get(k) == v for k, v in alike[c].items()), default=None
    )


def is_value(kind: Any, value: Any) -> bool:
    """Whether a value of a field with this annotation is one, or consists of such; None knows no texts."""
    if isinstance(value, str):
        return _lists(kind, value)
    if isinstance(value, list | tuple):
        return all(is_value(kind, part) for part in value)
    return value is None or isinstance(value, bool | int | float)


def _lists(kind: Any, text: str) -> bool:
    if get_origin(kind) is Literal:
        return text in get_args(kind)
    if get_origin(kind) is Annotated:
        kind, *metadata = get_args(kind)
        if any(isinstance(m, Word) and re.fullmatch(m.pattern, text) for m in metadata):
            return True
    return any(_lists(part, text) for part in get_args(kind))
