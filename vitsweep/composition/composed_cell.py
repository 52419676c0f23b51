"""ComposedCell: one cell as the command line asked for it, composed but not yet typed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Tree = dict[str, Any]

NOT_OF_THE_CELL = ("sweep", "tracker")
"""Nodes of the configuration that say where results go, not what is measured."""


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
        """Text that is equal for two cells that ask for the same."""
        cell = {k: v for k, v in self.tree.items() if k not in NOT_OF_THE_CELL}
        return json.dumps(cell, sort_keys=True, default=str)


def fresh(node: Any) -> Any:
    """Copy nested plain containers, so that no two cells share one."""
    if isinstance(node, dict):
        return {key: fresh(value) for key, value in node.items()}
    if isinstance(node, list):
        return [fresh(value) for value in node]
    return node


def has_interpolation(node: Any) -> bool:
    """True where a `${...}` makes a part depend on others."""
    if isinstance(node, dict):
        return any(has_interpolation(part) for pair in node.items() for part in pair)
    if isinstance(node, list):
        return any(map(has_interpolation, node))
    return isinstance(node, str) and "${" in node
