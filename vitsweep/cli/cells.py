"""What is typed without a verb: overrides, whose cells are measured and shown."""

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from vitsweep.api.session import CONFIG, SUBMITTED, NotOursError, Session, open_session
from vitsweep.cli import VERBS
from vitsweep.composition.composer import Composer
from vitsweep.composition.hydra import parse_overrides
from vitsweep.console import open_console
from vitsweep.errors import ExitCode, VitsweepError
from vitsweep.results.record import Status
from vitsweep.spec.menu import groups
from vitsweep.spec.resources import Machine
from vitsweep.words import did_you_mean

MULTIRUN = ("-m", "--multirun")
ONE_RUN = ("-r", "--run")
"""Hydra's default, and vitsweep's: one cell."""
QUIET = ("-q", "--quiet")
"""Print results alone, without progress."""
CONFIG_FLAGS = {
    "--config-dir": "config_dir",
    "-cd": "config_dir",
    "--config-name": "config_name",
    "-cn": "config_name",
}
HYDRA_FLAGS = (
    "--version", "--multirun", "--run", "--cfg", "--info", "--resolve", "--package", "--hydra-help",
    "--shell-completion", "--config-dir", "--config-name", "--config-path", "--experimental-rerun",
)  # fmt: skip
"""Long options that Hydra knows."""
SHORT_FLAGS = ("-c", "-i", "-sc", "-cp")
"""Of Hydra as well; `-p` is Slurm's, and Hydra's is `--package`."""


_SEPARATORS = (",", "=")
_JOINED = re.compile("[^ ,=]+( *[,=] *[^ ,=]+)+")
"""What is one word without spaces next to `,` and `=`."""
_ALL = "`python -m vitsweep show` lists all"


@dataclass
class Line:
    """A command line without a verb.

    Attributes:
        overrides: what sets or sweeps a key.
        config_dir: of `--config-dir`.
        config_name: of `--config-name`.
        is_quiet: whether progress is left out.
        of_hydra: a flag that Hydra alone knows, or the choice of a sweeper that is not vitsweep's.
    """

    overrides: list[str]
    config_dir: str | None = None
    config_name: str = CONFIG
    is_quiet: bool = False
    of_hydra: str = ""

    def session(self, machine: Machine | None = None) -> Session:
        """Compose the cells; `machine` is the node that defaults follow, None for the launcher's.

        Raises:
            NotOursError: Hydra alone can run them.
            VitsweepError: what was typed is wrong.
        """
        conf, console = (self.config_dir, self.config_name), open_console(stderr=True)
        console.quiet = self.is_quiet
        return open_session(self.overrides, console, *conf, command="", machine=machine)

    def measured(self) -> int | None:
        """Measure and show the cells; return the exit code, or None where Hydra alone can run them."""
        try:
            return None if self.of_hydra else finish(self.session())
        except NotOursError:
            return None


def read_line(arguments: Sequence[str], options: Collection[str] = ()) -> Line:
    """Separate the flags and overrides of a command line.

    Args:
        arguments: as typed.
        options: of the verb, which were read already.

    Raises:
        VitsweepError: Python runs without assertions, a word is no override, or several cells are
            asked for without `-m`.
    """
    if sys.flags.optimize:
        raise VitsweepError(
            "`python -O` and PYTHONOPTIMIZE leave out the assertions with which Hydra reads a command "
            "line: use `python -m vitsweep` without them."
        )
    line, words = Line([]), iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if word in (*MULTIRUN, *ONE_RUN):
            continue
        elif word in QUIET:
            line.is_quiet = True
        elif flag in CONFIG_FLAGS:
            given = value if equals else next(words, "")
            if not given or given.startswith("-"):
                what = "FOLDER" if CONFIG_FLAGS[flag] == "config_dir" else "NAME"
                raise VitsweepError(f"`{word}` names nothing: type `{flag} {what}`.")
            setattr(line, CONFIG_FLAGS[flag], given)
        elif word.startswith("-") and flag not in (*HYDRA_FLAGS, *SHORT_FLAGS):
            follows = "" if equals else next(words, "")
            is_value = follows and not follows.startswith("-") and "=" not in follows
            meant = _meant_option(flag, follows if is_value else value, arguments, options)
            raise VitsweepError(f"`{word}` is no option of vitsweep{meant}")
        elif word.startswith("-"):
            line.of_hydra = word
        elif is_override(word):
            line.overrides.append(word)
    if not line.of_hydra:
        check_words(arguments)
    return line


def _meant_option(flag: str, value: str, arguments: Sequence[str], options: Collection[str]) -> str:
    """Say what was meant with a flag; settings have no dashes."""
    _, dot, key = flag.partition(".")
    keys = [f"{name}{dot}{key}" for name in (*groups(), "sweep")]
    flags = ("--help", *HYDRA_FLAGS, *MULTIRUN, *QUIET, *options)

    def as_typed(name: str) -> str:
        if name in keys:
            return f"{'+' if name == 'sweep' else ''}{name}={value or '...'}"
        return f"{flag}={value}" if name == flag and value else name

    others = [word for word in arguments if word.partition("=")[0] != flag and word != value]
    overrides = [word for word in others if is_override(word)]

    def fits(words: str) -> bool:
        is_typed = words.startswith("python ") or words.partition(" ")[0] in flags
        return is_typed or _composer().takes(words, overrides)

    return did_you_mean(flag, [*keys, *flags], as_typed, _ALL, fits, " ".join(others))


@cache
def _composer() -> Composer:
    return Composer()


def check_words(arguments: Sequence[str]) -> None:
    """Refuse what is no override, and several cells without `-m`; name keys that are typed twice.

    Raises:
        VitsweepError: the text says what to type instead.
    """
    _refuse_words(arguments)
    overrides = [word for word in arguments if is_override(word)]
    parsed = parse_overrides(overrides)
    swept = [override for override in parsed if override.is_sweep_override()]
    if swept and not {*MULTIRUN} & set(arguments):
        # without -m a comma would silently make a list or a text of it
        raise VitsweepError(
            f"`{swept[0].input_line}` asks for several cells: add `-m` "
            f"(`python -m vitsweep -m {' '.join(arguments)}`)."
        )
    for notice in _repeated_keys(parsed):
        print(notice, file=sys.stderr)


def finish(session: Session) -> int:
    """Measure what is missing of a session's cells, and show all; return the exit code.

    Raises:
        SweepStopped: the user stopped it.
    """
    if session.searches:
        return int(session.searches.finish(session))

    from vitsweep.api.functions import measured  # pandas, for which no mistake waits

    with measured(session) as result:
        # loads the charts, for which no mistake waits
        from vitsweep.cli.summary import summarize

        rows = summarize(
            result, session.console, session.tracker, with_report=session.settings.report
        )
    return ExitCode.not_all_measured if result.cut_short else exit_code(rows)


def exit_code(rows: Sequence[Mapping[str, Any]]) -> ExitCode:
    """Return 0 if all cells are measured or submitted, 3 if some were not measured."""
    fine = all(row["status"] in (Status.measured, SUBMITTED) for row in rows)
    return ExitCode.ok if fine else ExitCode.not_all_measured


def _repeated_keys(overrides: Sequence[Any]) -> Iterator[str]:
    """Yield a notice for each key that was typed several times: only the last of them counts."""
    typed: dict[str, list[str]] = {}
    for override in overrides:
        typed.setdefault(override.get_key_element().lstrip("+~"), []).append(override.input_line)
    for key, texts in typed.items():
        if len(texts) > 1:
            named = ", ".join(f"`{text}`" for text in texts)
            values = ",".join(text.partition("=")[2] for text in texts)
            yield (
                f"`{key}` is given {len(texts)} times ({named}): the last one counts. A sweep over all "
                f"of them is `-m {key}={values}`."
            )


def is_override(argument: str) -> bool:
    """Tell whether a word sets, sweeps or removes a key."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


def _refuse_words(arguments: Sequence[str]) -> None:
    """Refuse what is neither a verb nor an override; the word after a flag is that flag's."""
    for place, (before, word) in enumerate(pairwise(["-m", *arguments])):
        of_flag = before.startswith("-") and before not in (*MULTIRUN, *ONE_RUN, *QUIET)
        if of_flag or word.startswith("-") or is_override(word):
            continue
        is_end = before.endswith(_SEPARATORS) or word.startswith(_SEPARATORS)
        apart = _JOINED.match(" ".join(arguments[max(0, place - is_end) :]))
        if apart and " " in apart[0]:
            whole = re.sub(" *([,=]) *", r"\1", apart[0])
            raise VitsweepError(f"`{apart[0]}`: no space next to `,` or `=`: `{whole}`.")
        if word in VERBS:
            rest = " ".join(a for a in arguments if a != word)
            raise VitsweepError(f"The verb comes first: `python -m vitsweep {word} {rest}`.")
        if is_override(before) and _composer().takes(whole := f"{before},{word}"):
            raise VitsweepError(f"`{before} {word}`: values are separated by commas: `{whole}`.")
        follows = arguments[place + 1 : place + 2] if word.endswith(":") else ()
        if hint := _hint("".join((word, *follows))):
            raise VitsweepError(f"`{word}` {hint}")
        rest = " ".join(other for other in arguments if other != word)
        raise VitsweepError(
            f"`{word}` is neither an override (`key=value`) nor a verb"
            + did_you_mean(
                word,
                VERBS,
                lambda verb: f"python -m vitsweep {verb}",
                f"the verbs are {', '.join(f'`{verb}`' for verb in VERBS)}",
                rest=rest,
            )
        )


def _hint(word: str) -> str:
    """Say what a group or a key without a value lacks; nothing of another word."""
    key, colon, value = re.sub(" *[:/] *", ":", word, count=1).partition(":")
    group = key.lstrip("+").partition(".")[0]
    if group not in groups():
        return ""
    if colon and _composer().takes(f"{key}={value}"):
        return f"is no override; did you mean `{key}={value}`?"
    typed = f"type `{key}=...`; " if key == group else ""  # a key may not exist
    return f"has no value: {typed}`python -m vitsweep show {group}` lists what there is."
