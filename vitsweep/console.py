"""Where sentences and tables go."""

import os
import sys

from rich.console import Console

WIDTH_IN_A_FILE = 160
"""A pipe or a log file has no width; rich would squeeze tables into 80 columns."""


class CommandConsole(Console):
    """A console without which a command goes on: a sweep whose reader has gone (`| head`) is measured."""

    def on_broken_pipe(self) -> None:
        """Print nothing any more."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for a table elsewhere."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = None if known else WIDTH_IN_A_FILE
    return CommandConsole(width=width, markup=False, emoji=False)  # `[fp8]` is text, not a style
