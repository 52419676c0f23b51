"""The sentences that state a result, by name: words and facts are in `sentences.yaml`."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import yaml


@cache
def sentences() -> Mapping[str, Mapping[str, str]]:
    """Return name -> `says`, a template of `str.format`, and `fact`, what was measured."""
    text = files("vitsweep.tables").joinpath("sentences.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Mapping[str, str]] = yaml.safe_load(text)
    return found


def say(name: str, /, **values: Any) -> str:
    """Return a sentence, or a clause of one, with its values."""
    return sentences()[name]["says"].format(**values)
