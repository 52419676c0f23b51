"""`vitsweep show`: what the choices of a group are, and what the file of one says."""

from collections.abc import Iterator, Sequence
from itertools import chain
from textwrap import TextWrapper

from vitsweep.cli import VERBS, Options
from vitsweep.errors import BadValueError
from vitsweep.spec.menu import choices, comment, conf_dir, groups, text_of
from vitsweep.words import did_you_mean

# What `--help` prints: the verbs, and every group of conf/ with its default; and what `show` says.

COMMAND = "python -m vitsweep"
WIDTH = 80
SWEEPS = "sweep"
"""Folder of the named sweeps, which are no choices of a cell."""


def usage() -> str:
    """Return how vitsweep is called: cells, sweeps, and the verbs."""
    examples = {
        f"{COMMAND} precision=O2 sharding=fsdp": "one cell and its baseline, here",
        f"{COMMAND} -m precision=O1,O2 sharding=ddp,fsdp": "a sweep of four cells, and their baseline",
        'eval "$(vitsweep -sc install=bash)"': "complete by the Tab key; zsh, fish: docs/commands.md",
    }
    verbs = {f"{COMMAND} {verb.name}": verb.summary for verb in VERBS.values()}
    return "\n".join(
        [
            "vitsweep: sweep the techniques that make Vision-Transformer training fast.",
            "",
            *(
                line
                for command, text in examples.items()
                for line in (f"  {command}", f"      {text}")
            ),
            "",
            "Verbs; `VERB --help` lists the options of one:",
            *_in_two_columns(verbs, 30),
            "",
            *_wrapped(
                "SWEEP is a name under results/ or a folder; `sweep.name=NAME` chooses it when cells run. "
                "Keys are set as group.key=value, swept as group.key=a,b or group.key=range(1,4)."
            ),
        ]
    )


def menu() -> str:
    """Return the groups in the order of conf/config.yaml, with default and number of choices."""
    return "\n".join(_groups())


def _groups() -> Iterator[str]:
    heading = ""
    yield f"\nGroups: default, number of choices; `{COMMAND} show GROUP` lists them."
    for name, group in groups().items():
        if group.heading != heading:
            heading = group.heading
            yield f"\n{heading}"
        if choices(name):
            named = f"{name}={group.plain}".ljust(25) + f"{len(choices(name)):>4}"
            yield from _in_two_columns({named: group.caption or "of Hydra"}, 30)
    yield "\nNamed sweeps: `+sweep=NAME`"
    yield from _wrapped(", ".join(choices(SWEEPS)), "  ")


def shown_group(group: str) -> str:
    """Return the choices of a group with all that their files say, the default marked with `*`."""
    known = groups().get(group)
    caption = known.caption if known else "named sweeps: `+sweep=NAME`"
    lines = [f"{group}: {caption}", ""]
    for name in choices(group):
        lines += [f"{'*' if known and name == known.plain else ' '} {name}"]
        lines += _wrapped(comment(group, name), "      ")
    typed = f"{'+' if group == SWEEPS else ''}{group}=..."
    last = f"One is chosen as `{typed}`; `{COMMAND} show {group}=...` shows its keys."
    return "\n".join([*lines, "", *_wrapped(last)])


def shown_choice(group: str, choice: str) -> str:
    """Return the file of a choice: what it is, and its keys with their values."""
    text = (conf_dir() / group / f"{choice}.yaml").read_text(encoding="utf-8")
    keys = [x for x in text.splitlines() if not x.startswith(("#", "_target_"))]
    plus = "+" if group == SWEEPS else ""
    return "\n".join(
        [
            f"{plus}{group}={choice}",
            *_wrapped(comment(group, choice), "  "),
            "",
            *chain.from_iterable(map(_lines, keys)),
        ]
    )


def _lines(line: str) -> list[str]:
    """Return a line of a file; a comment for which it has no room goes on in lines below."""
    key, mark, said = line.partition("  # ")
    return _wrapped(said, " " * len(key) + mark, key + mark) if said else [line]


def _wrapped(text: str, indent: str = "", first: str | None = None) -> list[str]:
    return TextWrapper(
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
    ).wrap(text)


def _in_two_columns(rows: dict[str, str], width: int) -> Iterator[str]:
    """Yield name and text side by side; a name that is too long has its text on the next line."""
    for name, text in rows.items():
        lines = _wrapped(text, " " * (width + 2))
        first = f"  {name:<{width}}"
        if len(name) < width:
            yield first + lines[0].lstrip()
            yield from lines[1:]
        else:
            yield first.rstrip()
            yield from lines


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_argument(
        "what",
        nargs="*",
        metavar="GROUP[=CHOICE]",
        help="such as `precision`, `precision=O2`, `model.blocks`, `sweep`",
    )


def run(arguments: Sequence[str]) -> int:
    """Print the menu, the choices of groups, or the files of choices; return 0.

    Raises:
        BadValueError: there is no such group or choice.
    """
    asked = VERBS["show"].read(arguments).what
    print("\n\n".join(map(_shown, asked)) if asked else menu().lstrip())
    return 0


def _shown(text: str) -> str:
    group, equals, choice = text.lstrip("+").partition("=")
    known = sorted(
        str(path.relative_to(conf_dir())) for path in conf_dir().rglob("*") if path.is_dir()
    )
    of, _, key = group.rpartition(".")
    found: dict[str, list[str]] = {}  # line of a key -> choices of the group that have it
    for each in choices(of) if of in known and not equals else ():
        for line in text_of(conf_dir() / of / f"{each}.yaml").splitlines():
            if line.startswith(f"{key}:"):
                found.setdefault(line, []).append(f"{of}={each}")
    if found:
        shown = (
            [*_wrapped(f"{', '.join(named)}:"), *_lines(line)] for line, named in found.items()
        )
        return "\n".join(chain.from_iterable(shown))
    if group not in known or not choices(group):
        raise BadValueError(
            f"`{text}`: there is no group `{group}`"
            + did_you_mean(
                group,
                known,
                lambda name: f"python -m vitsweep show {name}",
                "`python -m vitsweep show` lists them",
            )
        )
    if not equals:
        return shown_group(group)
    if choice not in choices(group):
        from vitsweep.composition.hydra import unknown_choice  # for a mistake alone

        raise unknown_choice(group, choice, choices(group))
    return shown_choice(group, choice)
