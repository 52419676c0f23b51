"""What `--help` prints: the verbs, then every group and choice of conf/ with its first comment."""

import os
import re
from collections.abc import Iterator
from textwrap import shorten

from vitsweep.cli.verbs import VERBS, Verb
from vitsweep.composition import hydra
from vitsweep.results.store import sweep_names
from vitsweep.spec.menu import choices, comment, conf_dir, groups

COMMAND = "python -m vitsweep"
SUMMARY_COLUMN = 61
"""Where the summaries of commands begin; a longer command has its summary on the next line."""


def usage() -> str:
    """Return how vitsweep is called: cells, sweeps, and the verbs."""
    examples = (
        ("precision=O2 sharding=fsdp", "one cell and its baseline, here"),
        ("-m precision=O1,O2 sharding=ddp,fsdp", "a sweep of four cells, and their baseline"),
    )
    verbs = ((f"{verb.name} {verb.usage}".rstrip(), verb.summary) for verb in VERBS.values())
    return "\n".join(
        [
            "vitsweep: sweep the techniques that make Vision-Transformer training fast.",
            "",
            *(_usage_line(f"{COMMAND} {words}", text) for words, text in (*examples, *verbs)),
            _usage_line(
                'eval "$(vitsweep -sc install=bash)"',
                "complete by the Tab key; zsh, fish: docs/commands.md",
            ),
            "",
            "SWEEP is a name under results/ or a folder; `sweep.name=NAME` chooses it when cells run.",
            "Keys are set as group.key=value, swept as group.key=a,b or group.key=range(1,4).",
        ]
    )


def _usage_line(command: str, text: str) -> str:
    gap = SUMMARY_COLUMN - len(command) - 2
    return (
        f"  {command}{' ' * gap}{text}" if gap > 0 else f"  {command}\n{' ' * SUMMARY_COLUMN}{text}"
    )


def menu() -> str:
    """Return the menu as text, in the order of conf/config.yaml, defaults marked with `*`."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    heading = ""
    for name, group in groups().items():
        if group.heading != heading:
            heading = group.heading
            yield f"\n{heading}"
        if choices(name):
            yield f"  {name + '=':<22} {group.caption}".rstrip()
            yield from _choices(name, group.plain)
    yield "\nNamed sweeps: `+sweep=NAME`"
    yield from _choices("sweep", "")


def _choices(group: str, plain: str) -> Iterator[str]:
    for name in choices(group):
        mark = "*" if name == plain else " "
        said = shorten(comment(group, name), 100, placeholder=" ...")
        yield f"   {mark} {name:<19} {said}".rstrip()


# What may follow in a half-typed command line, for the Tab key.
#
# Hydra writes the scripts for bash, zsh and fish and knows groups, choices and keys. Verbs, their options,
# sweeps and what follows a comma are added here.


FLAGS = ("--help", "--multirun", "--trust", "--shell-completion", "-m")


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
    loader = hydra.open_loader(conf_dir())
    found = hydra.completions(loader, "config", before, asked)
    chosen = done.split(",")
    values_found = [text.removeprefix(f"{key}=") for text in found]
    return [f"{key}={done}{v}" for v in values_found if v not in chosen] if equals else found
