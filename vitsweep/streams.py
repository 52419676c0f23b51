"""The standard streams of a command, whatever the shell has made of them, and what may be printed there."""

import io
import os
import re
import select
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from vitsweep.errors import ExitCode

_STEERING = re.compile(
    r"[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f]"
)
"""Characters that steer a terminal, reorder what it shows (bidirectional marks), or are not to be seen."""


def shown(text: str) -> str:
    """Return a text as it may be printed: what steers a terminal or reorders letters stands escaped."""
    if text.isprintable():
        return text
    return _STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


class ShownStream(io.TextIOWrapper):
    """A standard stream of a command: whatever is printed to it is `shown`, styles of a console aside."""

    def write(self, text: str, /) -> int:
        """Write a text escaped."""
        return self.write_styled(shown(text))

    def write_styled(self, text: str) -> int:
        """Write a text with the styles in it."""
        return super().write(text)


class Styled:
    """The file of a console, which has escaped the text before it added styles."""

    def __init__(self, stream: ShownStream) -> None:
        self.write, self._stream = stream.write_styled, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def prepare_streams() -> None:
    """Replace closed streams; print escaped what steers a terminal or the locale cannot show.

    A closed stream leaves its number free: the next file would get it, and receive what is printed.
    Warnings are printed as sentences, without the lines of source that gave them.
    """
    warnings.formatwarning = lambda message, *_, **__: f"Note: {message}\n"
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of libraries, as they are compiled
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            options = {
                n: getattr(stream, n) for n in ("encoding", "line_buffering", "write_through")
            }
            shown = ShownStream(stream.detach(), errors="backslashreplace", **options)
            setattr(sys, name, shown)


def as_typed(arguments: Sequence[str]) -> list[str]:
    """Return the command line read as UTF-8, also where the locale is another (`LC_ALL=C`).

    Bytes that are no UTF-8 become U+FFFD: no file could hold them as text.
    """
    return [os.fsencode(word).decode("utf-8", "replace") for word in arguments]


def reader_has_gone() -> bool:
    """Tell whether nobody reads the output any more (`| head`); the rest of it is dropped then."""
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in watched.poll(0)):
        return False
    _drop_output()
    return True


def flush(code: int) -> int:
    """Write what is still to be printed; return the exit code of the command.

    Returns:
        `code`, or 2 where the output cannot be written, such as to a full disk.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
    except OSError as error:
        print(f"The output cannot be written ({error.strerror}).", file=sys.stderr)
        _drop_output()
        return ExitCode.bad_input
    return code


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
