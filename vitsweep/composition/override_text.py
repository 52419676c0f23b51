"""Between text and overrides: texts are parsed with Hydra's grammar, values are written as texts."""

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from vitsweep.composition import hydra_internals
from vitsweep.errors import BadValueError

_NEEDS_NO_QUOTES = re.compile(r"[A-Za-z_][\w./-]*")
_READ_AS_OTHER_THAN_TEXT = ("null", "true", "false", "inf", "nan")


def parse_overrides(texts: Iterable[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Parse overrides with Hydra's grammar, each text once per process.

    Args:
        texts: as typed.
        loader: lists the choices of a group where `glob(...)` asks for them; without one the values
            of such an override cannot be enumerated.

    Raises:
        BadValueError: a text is no override.
    """
    return [_parsed(text, loader) for text in texts]


@lru_cache(maxsize=100_000)
def _parsed(text: str, loader: ConfigLoader | None) -> Override:
    try:
        return hydra_internals.parse(text, loader)
    except HydraException as error:
        raise BadValueError(_unreadable(text, error)) from error


def _unreadable(text: str, error: HydraException) -> str:
    """Say what Hydra's grammar does not read in an override, and how to quote it."""
    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        return f"`{text}` is no override: type `key=value`, such as `precision=O1`."
    if value[:1] in ("[", "{"):
        return (
            f"`{text}` cannot be read: brackets must close, and a text in a list or section that holds "
            f"more than letters, digits and `.-_/` stands in quotes, such as `{key}=['a=b']`."
        )
    if ",," in text or text.endswith(","):
        return f"`{text}` cannot be read: a value is missing beside a comma."
    return (
        f"`{text}` cannot be read: a text that holds more than letters, digits and `.-_/` stands in "
        f'quotes, and in others for the shell: `"{value_override(key, value)}"`.'
    )


def value_override(key: str, value: Any) -> str:
    """Return the override that sets `key` to `value`: one value, never read as a sweep.

    Raises:
        BadValueError: no setting can have such a value.
    """
    return f"{key}={hydra_internals.value_text(_quoted(plain_value(key, value)))}"


def sweep_override(key: str, values: list[Any]) -> str:
    """Return the override that sweeps `key` over `values`.

    Raises:
        BadValueError: no setting can have such a value.
    """
    plain = (_quoted(plain_value(key, value)) for value in values)
    return f"{key}=" + ",".join(map(hydra_internals.value_text, plain))


def plain_value(key: str, value: Any) -> Any:
    """Return a value of Python's as Hydra's grammar has them: None, bool, number, text, list or dict.

    Numbers and arrays of numpy, pandas and torch, ranges and other iterables, and paths are converted.

    Args:
        key: of the setting, for the error.
        value: that a setting should have.

    Raises:
        BadValueError: it is none of these.
    """
    if hasattr(value, "tolist"):  # of numpy, pandas, torch: the number or list in Python's types
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {name: plain_value(key, part) for name, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return [plain_value(key, part) for part in value]
    raise BadValueError(
        f"`{key}={value!r:.80}`: what is of type {type(value).__name__} is no value of a setting: give a "
        "number, a text, a path, True, False or None, or a list of these."
    )


def _quoted(value: Any) -> Any:
    """Quote the texts that Hydra's grammar would read as something else than a text."""
    if isinstance(value, dict):
        return {key: _quoted(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_quoted(part) for part in value]
    if not isinstance(value, str):
        return value
    if _NEEDS_NO_QUOTES.fullmatch(value) and value.lower() not in _READ_AS_OTHER_THAN_TEXT:
        return value
    return QuotedString(value, Quote.single)
