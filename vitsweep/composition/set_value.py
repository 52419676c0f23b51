"""Setting one value in a plain tree exactly as Hydra sets it in a composed configuration."""

import re
from collections.abc import Mapping
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType

from vitsweep.composition.suggestions import unknown_key
from vitsweep.errors import BadValueError

_PLAIN_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_SETS = (OverrideType.CHANGE, OverrideType.ADD, OverrideType.FORCE_ADD)


class NotLocalError(Exception):
    """A cell cannot be assembled from cached parts: Hydra must compose what sets a key.

    Attributes:
        root: the top-level key; `*` for all of them.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.root = root


def root_of(override: Override) -> str:
    """Return the top-level key that an override sets."""
    return override.key_or_group.replace("/", ".").split(".")[0]


def is_plain_value(override: Override) -> bool:
    """True for an override that sets one value and can affect nothing else."""
    return (
        override.type in _SETS
        and override.package is None
        and _PLAIN_KEY.fullmatch(override.key_or_group) is not None
        and _is_plain(override.value())
    )


def set_value(
    tree: dict[str, Any], override: Override, choices: Mapping[str, str] | None = None
) -> None:
    """Set the value of an override in `tree`.

    Args:
        tree: the configuration.
        override: of one value.
        choices: group -> choice that filled its node, for errors.

    Raises:
        BadValueError: the key does not exist, or `+` meets one that does.
        NotLocalError: Hydra has a rule of its own for the present value of the key.
    """
    *path, last = override.key_or_group.split(".")
    node, adds = tree, override.type is not OverrideType.CHANGE
    chosen = (choices or {}).get(path[0], "") if path else ""
    for depth, key in enumerate(path):
        if key not in node and not adds:
            raise unknown_key(override, path[:depth], key, node, chosen if depth == 1 else "")
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise NotLocalError(path[0])
    if last not in node and not adds:
        raise unknown_key(override, path, last, node, chosen if len(path) == 1 else "")
    _set(node, last, override)


def _set(node: dict[str, Any], key: str, override: Override) -> None:
    old, new = node.get(key), override.value()
    if isinstance(old, dict):
        raise NotLocalError(override.key_or_group.split(".")[0])
    is_free = old is None or old == "???" or isinstance(new, list)
    if override.type is OverrideType.ADD and not is_free:
        text = str(override.input_line).lstrip("+")
        raise BadValueError(
            f"`+{text}` would add what exists already (`{override.key_or_group}={old}`): "
            f"leave the `+` out, `{text}`."
        )
    node[key] = new


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return "${" not in value
    return value is None or isinstance(value, (bool, int, float))
