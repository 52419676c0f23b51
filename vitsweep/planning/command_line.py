"""What the user typed."""

import shlex
import sys
from pathlib import Path

_TYPED = tuple(sys.argv)


def command_line() -> str:
    """Return the command, quoted so that it can be typed again."""
    program = Path(_TYPED[0])
    typed = "python -m vitsweep" if program.name == "__main__.py" else program.name
    return " ".join([typed, *map(shlex.quote, _TYPED[1:])])
