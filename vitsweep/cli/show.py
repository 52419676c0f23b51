"""`vitsweep show`: what the choices of a group are, and what the file of one says."""

from collections.abc import Sequence

from vitsweep.cli.help import menu, shown_choice, shown_group
from vitsweep.cli.verbs import VERBS, Options
from vitsweep.errors import BadValueError, did_you_mean
from vitsweep.spec.menu import choices, conf_dir


def parser() -> Options:
    """Return the parser."""
    options = Options(VERBS["show"])
    options.add_argument(
        "what",
        nargs="*",
        metavar="GROUP[=CHOICE]",
        help="such as `precision`, `precision=O2`, `sweep`",
    )
    return options


def run(arguments: Sequence[str]) -> int:
    """Print the menu, the choices of groups, or the files of choices; return 0.

    Raises:
        BadValueError: there is no such group or choice.
    """
    asked = parser().parse_args(list(arguments)).what
    print("\n\n".join(map(_shown, asked)) if asked else menu().lstrip())
    return 0


def _shown(text: str) -> str:
    group, equals, choice = text.lstrip("+").partition("=")
    known = sorted(
        str(path.relative_to(conf_dir())) for path in conf_dir().rglob("*") if path.is_dir()
    )
    if group not in known or not choices(group):
        raise BadValueError(
            f"`{text}`: there is no group `{group}`."
            + did_you_mean(group, known, lambda name: f"python -m vitsweep show {name}")
            + " `python -m vitsweep show` lists them."
        )
    if not equals:
        return shown_group(group)
    if choice not in choices(group):
        raise BadValueError(
            f"`{text}`: `{group}` has no choice `{choice}`."
            + did_you_mean(choice, choices(group), lambda name: f"{group}={name}")
            + f" It has {', '.join(f'`{name}`' for name in choices(group))}."
        )
    return shown_choice(group, choice)
