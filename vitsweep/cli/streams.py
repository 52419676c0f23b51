"""The standard streams of a command, whatever the shell has made of them."""

import io
import os
import select
import sys
import warnings
from collections.abc import Sequence

from vitsweep.errors import ExitCode


def prepare_streams() -> None:
    """Replace closed streams, and let text that the locale cannot show be printed escaped.

    A closed stream leaves its number free: the next file would get it, and receive what is printed.
    Warnings are printed as sentences, without the lines of source that gave them.
    """
    warnings.formatwarning = lambda message, *_, **__: f"Note: {message}\n"
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
