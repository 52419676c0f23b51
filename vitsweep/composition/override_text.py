"""From a value back to what one would type."""

import re
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from vitsweep.composition import hydra_internals

_BARE = re.compile(r"[A-Za-z_][\w./-]*")
_NOT_TEXT = ("null", "true", "false", "inf", "nan")


def typed(key: str, value: Any) -> str:
    """Return the override that sets `key` to `value`: one value, never read as a sweep."""
    return f"{key}={hydra_internals.value_text(_quoted(value))}"


def swept(key: str, values: list[Any]) -> str:
    """Return the override that sweeps `key` over `values`."""
    return f"{key}=" + ",".join(hydra_internals.value_text(_quoted(value)) for value in values)


def _quoted(value: Any) -> Any:
    """Mark the texts that Hydra's grammar would take for something else."""
    if isinstance(value, dict):
        return {key: _quoted(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_quoted(part) for part in value]
    if not isinstance(value, str) or (_BARE.fullmatch(value) and value.lower() not in _NOT_TEXT):
        return value
    return QuotedString(value, Quote.single)
