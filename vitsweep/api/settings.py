"""Settings given in Python, written as the overrides that the command line takes."""

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from vitsweep.composition.override_text import plain_value, sweep_override, value_override
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.errors import BadValueError

Overrides = str | Sequence[str]
"""Overrides in Hydra's grammar: a list of them, or one text as typed in a shell."""


_EXPECTED = (
    "give texts such as 'precision=O1,O2', or settings by name, such as precision=['O1', 'O2']."
)


def as_overrides(overrides: Overrides, settings: Mapping[str, Any]) -> list[str]:
    """Return overrides as typed after `python -m vitsweep -m`.

    Args:
        overrides: in Hydra's grammar, such as `["precision=O1,O2"]`.
        settings: key -> value. A list, range or array sweeps the key, a mapping sets keys below it:
            `batch={"images_per_step": [32, 64]}` is `batch.images_per_step=32,64`.

    Raises:
        BadValueError: `overrides` is neither a text nor a list of texts, a list is empty, a value is none
            that a setting can have, or a key is given in both, or is one of `sweep` without it.
    """
    if not isinstance(overrides, Iterable) or isinstance(overrides, (Mapping, bytes)):
        raise BadValueError(f"`{overrides!r:.80}` is no list of overrides: {_EXPECTED}")
    _refuse_keys_of_sweep(settings)
    texts = shlex.split(overrides) if isinstance(overrides, str) else list(overrides)
    for text in texts:
        if not isinstance(text, str):
            raise BadValueError(f"`{text!r}` is no override: {_EXPECTED}")
    named = list(_of_settings(settings, ""))
    for text in named:
        refuse_second(texts, text)
    return [*texts, *named]


def _refuse_keys_of_sweep(settings: Mapping[str, Any]) -> None:
    """Refuse keys that stand in the section `sweep`, and say how they are given.

    Raises:
        BadValueError: all of them are named.
    """
    known = {field.name for field in fields(SweepSettings)}
    if not (found := {key: value for key, value in settings.items() if key in known}):
        return
    typed = ", ".join(f"`{key}={value!r}`" for key, value in found.items())
    what = f"`{next(iter(found))}` stands" if len(found) == 1 else "they stand"
    budget = ", or `minutes` of `vitsweep.race`, whose budget it is" if "minutes" in found else ""
    raise BadValueError(f"{typed}: {what} in the section `sweep`: use `sweep={found!r}`{budget}.")


def refuse_second(texts: Sequence[str], added: str) -> None:
    """Refuse an override whose key some texts have as well: one of them would be dropped silently.

    Raises:
        BadValueError: both are named.
    """
    for text in texts:
        if text != added and _key(text) == _key(added):
            raise BadValueError(f"`{text}` and `{added}` set the same key: give one of them.")


def _key(text: str) -> str:
    return text.lstrip("+").partition("=")[0]


def _of_settings(settings: Mapping[str, Any], above: str) -> Iterator[str]:
    for name, value in settings.items():
        key = f"{above}{name}"
        if above.endswith("arguments."):  # of a function: no YAML lists them
            key = f"++{key.removeprefix('++')}"
        if isinstance(value, Mapping):
            yield from _of_settings(value, f"{key}.")
        elif isinstance(plain := plain_value(key, value), list):
            if not plain:
                raise BadValueError(f"`{key}=[]` holds no value: give at least one.")
            yield sweep_override(key, plain)
        else:
            yield value_override(key, plain)
