"""Tables of the documentation, made from the code and from conf/. `python docs/tables.py` writes them.

A page asks for one with a comment line, `<!-- generated: metrics -->` or `<!-- generated: choices
precision -->`; the names are the keys of `GENERATED`. The text stands below it, up to `<!-- end -->`, so
that it can be read on GitHub. `tests/test_docs.py` holds it current.
"""

import os
import re
from collections.abc import Callable
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from vitsweep.cli import VERBS
from vitsweep.composition.composer import Composer
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.results.metrics import FLAGS, METRICS
from vitsweep.spec.cell_spec import GROUPS
from vitsweep.spec.menu import choices as menu_of
from vitsweep.spec.menu import comment, conf_dir, groups, plain_choice
from vitsweep.spec.resources import Machine

DOCS = Path(__file__).parent
MARKED = re.compile(
    r"^<!-- generated: (?P<name>\w+)(?: (?P<argument>[\w/]+))? -->\n"
    r"(?:(?:(?!<!-- generated:).)*?^<!-- end -->\n)?",
    re.DOTALL | re.MULTILINE,
)
ARXIV = re.compile(r"\barXiv:(\d{4}\.\d{4,5})")
HELP = re.compile(
    r" \[-h\]|(?:^options:\n)?^  -h, --help +show this help message and exit\n(?=\Z)"
    r"|^  -h, --help +show this help message and exit\n",
    re.MULTILINE,
)
"""The option `--help`, and the heading of options where it is the only one."""
ASKED = {
    "`dit_*`": "model=dit_xl_2 objective=flow_matching data=synthetic data.num_channels=4",
    "`stdit_*`": "model=stdit_1b objective=flow_matching data=synthetic_latents",
    "`masked_autoencoder`": "model=vit_base objective=masked_autoencoder data=synthetic",
    "`lejepa`": "model=vit_base objective=lejepa data=synthetic",
    "`self_distillation`": "model=vit_base objective=self_distillation data=synthetic",
}
"""Column -> a cell of an objective, of whose techniques one is changed."""
BESIDE = ("batch.images_per_step=64", "precision=O1", "resources.ranks_per_node=4")
ALONE = {
    "sharding=none": "resources.ranks_per_node=1",
    "sequence_parallel=lasp": "attention=linear attention.causal=true",
    "sequence_parallel=lasp2": "attention=linear",
}
"""Choice -> what it needs beside it, whatever the objective."""
WIDTH = 80
"""Characters of a line in the help of a verb."""


def current(page: str) -> str:
    """Return the text of a page with its tables as they are now."""
    return MARKED.sub(_with_table, page)


def _with_table(marked: re.Match[str]) -> str:
    name, argument = marked["name"], marked["argument"]
    text = GENERATED[name](argument) if argument else GENERATED[name]()
    first = marked[0].partition("\n")[0]
    return f"{first}\n\n{text}\n\n<!-- end -->\n"


def metrics() -> str:
    """Return the table of all measured columns."""
    better = {"higher": "higher", "lower": "lower", None: ""}
    rows = (
        (f"`{m.column}`", m.label, "" if m.unit == "1" else m.unit, better[m.better], m.definition)
        for m in METRICS.values()
    )
    return _table(("column", "what", "unit", "better", "how it is computed"), rows)


def flags() -> str:
    """Return the table of validity flags."""
    return _table(("flag", "what it says"), ((f"`{f.column}`", f.caption) for f in FLAGS.values()))


def menu() -> str:
    """Return all groups: those with a page as a table of links, the others with their choices."""
    links, parts = [], []
    for group, (default, what, _) in groups().items():
        names = menu_of(group)
        if (DOCS / "techniques" / f"{group}.md").exists():
            others = ", ".join(f"`{name}`" for name in names if name != default)
            links.append(
                (f"[{group}](techniques/{group}.md)", f"`{default}`", others, _sentence(what))
            )
        elif names:
            parts.append(f"## {group}\n\n{_sentence(what)}\n\n{choices(group)}")
    table = _table(("group", "default", "other choices", "what it decides"), links)
    return "\n\n".join([f"## Techniques\n\n{table}", *parts])


def choices(group: str) -> str:
    """Return every choice of a group with its comment; those of `machine` say when each is the default."""
    default = plain_choice(group) if group != "machine" else ""
    rows = (
        (
            f"`{group}={name}`" + (" (default)" if name == default else ""),
            _sentence(comment(group, name)),
        )
        for name in menu_of(group)
    )
    return _table(("choice", "what it is"), rows)


def sweeps() -> str:
    """Return every named sweep with its question."""
    rows = []
    for path in sorted((conf_dir() / "sweep").glob("*.yaml")):
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        rows.append((f"`+sweep={path.stem}`", tree.get("question", "")))
    return _table(("sweep", "what it asks"), rows)


def fits() -> str:
    """Return which choices an objective refuses, as the code says it for four ranks on GPUs."""
    node = Machine(device="cuda", cores_per_node=64, devices_per_node=8, described_by="docs")
    composer, rows = Composer(), []
    for group in (g for g in GROUPS if g != "loader"):  # of files of images
        for choice in (f"{group}={name}" for name in menu_of(group)):
            words = [*BESIDE, choice, *ALONE.get(choice, "").split()]
            plans = [
                plan_cell(composer.compose([*a.split(), *words]), node) for a in ASKED.values()
            ]
            if any(plan.reasons for plan in plans):
                rows.append((f"`{choice}`", *("refused" if p.reasons else "" for p in plans)))
    return _table(("choice", *ASKED), rows)


def commands() -> str:
    """Return the help of every verb, without `--help` itself."""
    parts = []
    for verb in VERBS.values():
        with patch.dict(os.environ, COLUMNS=str(WIDTH)):
            help_text = HELP.sub("", verb.parser().format_help()).strip()
        parts.append(f"## {verb.name}\n\n```text\n{help_text}\n```")
    return "\n\n".join(parts)


def conf(path: str) -> str:
    """Return the settings of a file of conf/ with their comments; the menu has the file's own."""
    lines = (conf_dir() / f"{path}.yaml").read_text(encoding="utf-8").strip().splitlines()
    body = "\n".join(dropwhile(lambda line: line.startswith("#"), lines))
    return f"```yaml\n{body}\n```"


def section(name: str) -> str:
    """Return a section of conf/config.yaml as it is."""
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8")
    body = text.partition(f"\n{name}:\n")[2]
    lines = takewhile(lambda line: not line or line.startswith(" "), body.splitlines())
    return f"```yaml\n{name}:\n" + "\n".join(lines).rstrip() + "\n```"


GENERATED: dict[str, Callable[..., str]] = {
    make.__name__: make
    for make in (metrics, flags, menu, choices, sweeps, fits, commands, conf, section)
}
"""Name in a marker -> the function that makes the text."""


def _sentence(text: str) -> str:
    """Return text as Markdown: a capital, a full stop, links to papers, and nothing that reads as HTML."""
    text = text.strip().replace("<", "&lt;")
    text = ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return text[:1].upper() + text[1:] + ("" if not text or text[-1] in ".?!)" else ".")


def _table(head: tuple[str, ...], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(str(c).replace("|", "\\|").replace("\n", " ") for c in line) + " |"
        for line in lines
    )


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        before = path.read_text(encoding="utf-8")
        if (after := current(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(f"{path.relative_to(DOCS.parent)} is rewritten.")
