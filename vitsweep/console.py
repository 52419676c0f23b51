"""Where sentences and tables go."""

import os
import sys

from rich.console import Console

WIDTH_IN_A_FILE = 160
"""A pipe or a log file has no width; rich would squeeze tables into 80 columns."""


def open_console() -> Console:
    """Return a console as wide as the terminal, or wide enough for a table elsewhere."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDTH_IN_A_FILE)
