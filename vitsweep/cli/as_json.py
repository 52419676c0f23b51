"""`--json`: what a verb found, alone on stdout; docs/scripts.md says what scripts may rely on."""

import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from pandas import DataFrame

SCHEMA = 1
"""Raised where a key of what is printed goes, or means something else."""
OPTION = "--json"
_outputs: list[TextIO] = []


@contextmanager
def result_alone() -> Iterator[None]:
    """Send to stderr whatever else is printed, also by other processes and by C: Gloo of torch 2.9 does."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    found = io.StringIO()
    _outputs.append(found)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        _outputs.pop()
        print(found.getvalue(), end="")


def print_json(**found: Any) -> None:
    """Print one JSON object on one line; values that are missing or not finite are null."""
    print(
        json.dumps(_plain({"schema": SCHEMA, **found})),
        file=_outputs[-1] if _outputs else sys.stdout,
    )


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
