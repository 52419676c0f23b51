"""ComposedCell: the overrides of one cell and the configuration composed from them, not yet typed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tree = dict[str, Any]

OUTSIDE_THE_CELL = ("sweep", "tracker", "metric")
"""Top-level nodes of the configuration that say where results go, not what is measured."""


@dataclass(frozen=True)
class ComposedCell:
    """One cell of a sweep before `spec.from_yaml`.

    Attributes:
        overrides: what to type to get exactly this cell; Hydra composes it from them as well.
        choices: config group -> choice, in the order of the defaults list.
        tree: the composed configuration as plain containers without Hydra's own node; the node of
            each group carries `name`, its choice.
    """

    overrides: tuple[str, ...]
    choices: Mapping[str, str]
    tree: Tree

    @property
    def key(self) -> str:
        """Text that is equal for two cells whose configurations are equal."""
        cell = {k: v for k, v in self.tree.items() if k not in OUTSIDE_THE_CELL}
        return json.dumps(cell, sort_keys=True, default=str)


def copy_tree(node: Any) -> Any:
    """Copy nested plain containers, so that no two cells share one."""
    if isinstance(node, dict):
        return {key: copy_tree(value) for key, value in node.items()}
    if isinstance(node, list):
        return [copy_tree(value) for value in node]
    return node


def has_interpolation(node: Any) -> bool:
    """True where a `${...}` makes a part depend on others."""
    if isinstance(node, dict):
        return any(has_interpolation(part) for pair in node.items() for part in pair)
    if isinstance(node, list):
        return any(map(has_interpolation, node))
    return isinstance(node, str) and "${" in node
