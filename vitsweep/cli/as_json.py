"""`--json`: what a verb found, alone on stdout; docs/scripts.md says what scripts may rely on."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA = 1
"""Raised where a key of what is printed goes, or means something else."""
OPTION = "--json"
_outputs = [sys.stdout]


@contextmanager
def result_alone() -> Iterator[None]:
    """Send to stderr whatever else is printed."""
    _outputs.append(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _outputs.pop()


def print_json(**found: Any) -> None:
    """Print one JSON object on one line; values that are missing or not finite are null."""
    print(json.dumps(_plain({"schema": SCHEMA, **found})), file=_outputs[-1])


def rows_of(table: "DataFrame") -> list[dict[Any, Any]]:
    """Return the rows of a table."""
    return table.astype(object).to_dict("records")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(part) for part in value]
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return None if str(value) in ("<NA>", "NaT") else str(value)
