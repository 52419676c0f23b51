"""Options of the verbs: argparse, with the project's way of reporting errors."""

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import NoReturn

from vitsweep.cli.verbs import Verb
from vitsweep.errors import BadValueError, VitsweepError


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
        fault = "cannot be written: choose another place"
    else:
        return
    raise BadValueError(f"`{option} {file}` {fault}.")


class Options(ArgumentParser):
    """Parser of one verb.

    Args:
        verb: whose usage and summary are shown.
        description: more than the summary says, for `--help`.
    """

    def __init__(self, verb: Verb, description: str = "") -> None:
        super().__init__(
            prog=f"python -m vitsweep {verb.name}",
            usage=f"python -m vitsweep {verb.name} {verb.usage}".rstrip(),
            description=description or f"{verb.summary[:1].upper()}{verb.summary[1:]}.",
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def add_sweep(self) -> None:
        """Take the name of a sweep as the verb's only positional argument."""
        self.add_argument(
            "sweep",
            nargs="?",
            metavar="SWEEP",
            help="name under results/ or folder (that of the latest command)",
        )

    def error(self, message: str) -> NoReturn:
        """Refuse what was typed.

        Raises:
            VitsweepError: always; the text names what is wrong, and how the verb is typed.
        """
        raise VitsweepError(f"{message[:1].upper()}{message[1:]}.\n{self.format_usage().strip()}")
