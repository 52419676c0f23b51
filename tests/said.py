"""What a result sentence must say of a case: its name in the registry, and the values in it."""

from string import Formatter
from typing import Any

from vitsweep.tables.sentences import sentences


def opening(name: str, /, **values: Any) -> str:
    """Return a sentence of `tables/sentences.yaml` with its values, up to the first one that is not given."""
    text = ""
    for words, field, form, _ in Formatter().parse(sentences()[name]["says"]):
        text += words
        if field is None:
            continue
        if field not in values:
            break
        text += format(values[field], form or "")
    return text
