"""A user's function, named by its path: `package.module.function`."""

import re
from importlib import import_module
from typing import Any

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def is_function_path(text: str) -> bool:
    """Tell whether a text could be `package.module.function`."""
    return _PATH.fullmatch(text) is not None


def imported_function(path: str) -> Any:
    """Return what stands at a path.

    Raises:
        Exception: whatever importing its module raises; AttributeError where it has no such name.
    """
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)
