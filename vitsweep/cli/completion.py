"""What may follow in a half-typed command line, for the Tab key.

Hydra writes the scripts for bash, zsh and fish and knows groups, choices and keys. Verbs, their options,
sweeps and what follows a comma are added here.
"""

import os
import re

from vitsweep.cli.verbs import VERBS, Verb
from vitsweep.composition import hydra_internals
from vitsweep.composition.conf_dir import conf_dir
from vitsweep.results.find import sweep_names

FLAGS = ("--help", "--multirun", "--shell-completion", "-m")


def typed_line() -> str:
    """Return what the shell says was typed after the name of the program, up to the cursor."""
    line = os.environ.get("COMP_LINE", "")
    before_cursor = line[: int(os.environ.get("COMP_POINT") or len(line))]
    return re.sub(r"^\s*\S+\s*", "", before_cursor)


def suggestions(line: str) -> list[str]:
    """Return the words that may stand where the last word of `line` stands."""
    words = [*line.split(), ""] if line.endswith(" ") or not line else line.split()
    *before, word = words
    verb = VERBS.get(before[0]) if before else None
    if word.startswith("-"):
        found = _flags_of(verb) if verb else [*FLAGS]
    elif verb and not verb.names_a_sweep and "override" not in verb.usage:
        found = []
    elif verb and verb.names_a_sweep and "=" not in word:
        found = sweep_names()
    else:
        found = _overrides([w for w in before if "=" in w], word) + ([] if before else [*VERBS])
    return sorted(text for text in found if text.startswith(word))


def _flags_of(verb: Verb) -> list[str]:
    return [flag for action in verb.parser()._actions for flag in action.option_strings]


def _overrides(before: list[str], word: str) -> list[str]:
    """Ask Hydra, for the value after the last comma alone."""
    key, equals, values = word.partition("=")
    done = values[: values.rfind(",") + 1]
    asked = f"{key}{equals}{values.removeprefix(done)}"
    loader = hydra_internals.open_loader(conf_dir())
    found = hydra_internals.completions(loader, "config", before, asked)
    chosen = done.split(",")
    values_found = [text.removeprefix(f"{key}=") for text in found]
    return [f"{key}={done}{v}" for v in values_found if v not in chosen] if equals else found
