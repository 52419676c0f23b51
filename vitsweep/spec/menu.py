"""What conf/ offers: its groups, their choices in the order of the menu, and what each is.

A group is a line of `config.yaml`: its default choice, and what the group is about as a comment. A
choice is a YAML that begins with a comment. Choices follow the default one by the number in their line
`# @order 20`; those without such a line come last, by name. Hydra is not needed to read them.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_HEADING = re.compile(r"  # (.*)")
_GROUP = re.compile(r"  - (?:override )?(?P<name>[\w/]+): (?P<plain>\w+)\s*(?:# *(?P<caption>.*))?")
_TARGET = re.compile(r"^_target_: (\S+)", re.MULTILINE)
_ORDER = re.compile(r"^# @order (\d+)$", re.MULTILINE)


class Group(NamedTuple):
    """A line of the menu: which choice is the default, what the group is about, and the heading above it."""

    plain: str
    caption: str
    heading: str


def conf_dir() -> Path:
    """Return the folder of `config.yaml` and the config groups: in an installed package, or next to it.

    Raises:
        FileNotFoundError: the installation is damaged.
    """
    package = Path(__file__).parents[1]
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise FileNotFoundError(
        f"vitsweep's conf/ is neither in {package} nor next to it: install it again."
    )


@cache
def groups() -> dict[str, Group]:
    """Return name -> group, in the order of `config.yaml`."""
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8").partition("\ndefaults:\n")[2]
    found: dict[str, Group] = {}
    heading = ""
    for line in takewhile(lambda line: line.startswith(" "), text.splitlines()):
        if title := _HEADING.fullmatch(line):
            heading = title[1]
        elif group := _GROUP.fullmatch(line):
            found[group["name"]] = Group(group["plain"], group["caption"] or "", heading)
    return found


@cache
def choices(group: str) -> tuple[str, ...]:
    """Return the choices of a group (or of a folder of conf/ like `sweep`), the default one first."""
    plain = groups()[group].plain if group in groups() else None
    places = {
        path.stem: _ORDER.search(text_of(path)) for path in (conf_dir() / group).glob("*.yaml")
    }
    by_number = {name: int(place[1]) if place else 1000 for name, place in places.items()}
    return tuple(sorted(by_number, key=lambda name: (name != plain, by_number[name], name)))


def plain_choice(group: str) -> str:
    """Return the choice of a group that the baseline has."""
    return groups()[group].plain


@cache
def class_of(group: str, choice: str) -> Any:
    """Return the class of a choice; None for one that is not on the menu."""
    if choice not in choices(group):
        return None
    [target] = _TARGET.findall(text_of(conf_dir() / group / f"{choice}.yaml"))
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


@cache
def content_of(group: str, choice: str) -> Mapping[str, Any]:
    """Return the settings of a choice as its YAML has them."""
    content = yaml.safe_load(text_of(conf_dir() / group / f"{choice}.yaml"))
    return content if isinstance(content, dict) else {}


def comment(group: str, choice: str) -> str:
    """Return the comment that a YAML begins with, in one line."""
    lines = text_of(conf_dir() / group / f"{choice}.yaml").splitlines()
    block = takewhile(lambda line: line.startswith("#"), lines)
    return " ".join(line.lstrip("# ") for line in block if not line.startswith("# @"))


def text_of(path: Path) -> str:
    """Return the text of a YAML."""
    return path.read_text(encoding="utf-8")
