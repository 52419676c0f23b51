"""What is typed: the verbs, which help, completion and documentation follow, and their options."""

import io
import json
import math
import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from vitsweep import extras
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.words import did_you_mean, plain_number

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True)
class Verb:
    """One verb.

    Its module has `add_options(options)`, `run(arguments) -> int`, which returns the exit code, and `HELP`
    where the summary does not say enough. It is imported only when the verb is typed, helped with or
    completed.

    Attributes:
        name: as typed after `python -m vitsweep`.
        summary: what it does, in one line.
        module: by default `vitsweep.cli.<name>`.
    """

    name: str
    summary: str
    module: str = ""

    def _imported(self) -> ModuleType:
        return import_module(self.module or f"vitsweep.cli.{self.name}")

    def parser(self) -> "Options":
        """Return the parser of what follows the verb."""
        module = self._imported()
        options = Options(self, getattr(module, "HELP", ""))
        module.add_options(options)
        return options

    def read(self, arguments: Sequence[str]) -> Namespace:
        """Read what was typed after the verb."""
        return self.parser().read(arguments)

    def run(self, arguments: Sequence[str]) -> int:
        """Do what was typed after the verb; return the exit code."""
        if OPTION not in arguments:
            return int(self._imported().run(arguments))
        with result_alone():
            return int(self._imported().run(arguments))


_CORE = {
    "plan": "list cells with state and predictions; runs nothing",
    "status": "show jobs and cells of a submitted sweep, or list all sweeps",
    "collect": "write parquet and CSV files anew, and show the table",
    "report": "write one HTML page of a sweep, which a browser prints to PDF",
    "retry": "run cells again that were not measured",
    "cancel": "end the jobs of a sweep; what was measured is kept",
    "pack": "put the files of a sweep's cells into one; every verb reads it",
    "show": "say what the choices of a group are, and what one sets",
}
_ADDED = {name: Verb(name, *of_feature) for name, of_feature in extras.VERBS.items()}
VERBS = {name: Verb(name, summary) for name, summary in _CORE.items()} | _ADDED


# Options of the verbs: argparse, with the project's way of reporting errors.


def require_writable(option: str, file: Path) -> None:
    """Refuse the file of an option before anything is computed for it.

    Raises:
        BadValueError: it is a folder, or its folder is missing or cannot be written.
    """
    folder = file.parent
    if file.is_dir():
        fault = "is a folder: add the name of a file"
    elif not folder.is_dir():
        fault = f"lies in no folder: `mkdir -p {folder}` makes it"
    elif not os.access(file if file.exists() else folder, os.W_OK):
        fault = "cannot be written: choose another file"
    else:
        return
    raise BadValueError(f"`{option} {file}` {fault}.")


class Options(ArgumentParser):
    """Parser of one verb.

    Args:
        verb: whose summary is shown.
        description: more than the summary says, for `--help`.
    """

    def __init__(self, verb: Verb, description: str = "") -> None:
        self.verb = verb
        super().__init__(
            prog=f"python -m vitsweep {verb.name}",
            description=description or f"{verb.summary[:1].upper()}{verb.summary[1:]}.",
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def read(self, arguments: Sequence[str]) -> Namespace:
        """Read what was typed; options may stand anywhere among the other words."""
        words = [word for word in arguments if word != "--"]
        known = self._option_string_actions
        if unknown := [w for w in words if w[:2] == "--" and w.partition("=")[0] not in known]:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")  # before what is required
        return self.parse_intermixed_args(words)

    def add_sweep(self) -> None:
        """Take the name of a sweep as the verb's only positional argument."""
        self.add_argument(
            "sweep",
            nargs="?",
            metavar="SWEEP",
            help="name under results/ or folder (the latest)",
        )

    def add_config_dir(self) -> None:
        """Take `--config-dir`."""
        self.add_argument("--config-dir", metavar="FOLDER", help="with choices of your own")

    def add_json(self) -> None:
        """Take `--json`."""
        self.flag(OPTION, help="print one JSON object (docs/scripts.md)")

    def flag(self, *names: str, help: str) -> None:
        """Take an option without a value."""
        self.add_argument(*names, action="store_true", help=help)

    def number(
        self,
        option: str,
        default: float,
        help: str,
        least: float | None = None,
        most: float = math.inf,
        metavar: str | None = None,
    ) -> None:
        """Take a number of the type of `default`: above 0 and finite, or within `least` and `most`."""
        kind = type(default)
        if least is None:
            rule = "a number above 0" if most == math.inf else f"above 0, and {most:g} at most"
        else:
            rule = f"at least {least}" if most == math.inf else f"from {least} to {most:,}"

        def read(text: str) -> float:
            value = kind(plain_number(option, text))
            if not (0 < value < math.inf if least is None else least <= value) or value > most:
                meant = f": {value:g} % is {value / 100:g}" if most < 1 < value < 100 else ""
                raise BadValueError(f"`{option} {text}` must be {rule}{meant}.")
            return value

        read.__name__ = kind.__name__  # by which argparse calls what is none
        self.add_argument(option, type=read, default=default, help=help, metavar=metavar)

    def error(self, message: str) -> NoReturn:
        """Refuse what was typed.

        Raises:
            VitsweepError: always; the text names what is wrong, and how the verb is typed.
        """
        unknown = message.partition("unrecognized arguments: ")[2].split()
        option = next((word for word in unknown if word.startswith("-")), "").partition("=")[0]
        there = self._option_string_actions
        meant = (
            did_you_mean(option, there, str, fits=lambda w: w.split()[0] in there) if option else ""
        )
        is_named = any(a.dest == "sweep" and not a.option_strings for a in self._actions)
        if option == "--sweep" and is_named:
            meant = f"; type its name alone: `{self.verb.name} SWEEP`."
        elif unknown and not option and "--to" in there:
            meant = f"; did you mean `--to {unknown[0]}`?"
        text = f"{message[:1].upper()}{message[1:]}{meant}"
        if option and "did you mean" not in meant:
            text += f" `{self.verb.name}`: {self.verb.summary}."
        lacking = message.partition("are required: ")[2].split(", ")
        asked = [a for a in self._actions if {*a.option_strings} & {*lacking}]
        text += "".join(f"\n`{a.option_strings[0]} {a.metavar}`: {a.help}." for a in asked)
        raise VitsweepError(f"{text}\n{self.format_usage().strip()}")


# `--json`: what a verb found, alone on stdout; docs/scripts.md says what scripts may rely on.

SCHEMA = 2
"""Raised where a key of what is printed goes, or means something else."""
OPTION = "--json"
_outputs: list[TextIO] = []


@contextmanager
def result_alone() -> Iterator[None]:
    """Send to stderr whatever else is printed, also by other processes and by C: Gloo of torch 2.9 does."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    found = io.StringIO()
    _outputs.append(found)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        _outputs.pop()
        print(found.getvalue(), end="")


def print_json(**found: Any) -> None:
    """Print one JSON object on one line; values that are missing or not finite are null."""
    print(
        json.dumps(_plain({"schema": SCHEMA, **found})),
        file=_outputs[-1] if _outputs else sys.stdout,
    )


def rows_of(table: "DataFrame") -> list[dict[Any, Any]]:
    """Return the rows of a table."""
    return table.astype(object).to_dict("records")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(part) for part in value]
    if hasattr(value, "item"):  # a number of numpy
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    return None if str(value) in ("<NA>", "NaT") else str(value)
