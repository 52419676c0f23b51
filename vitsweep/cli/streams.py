"""The standard streams of a command, whatever the shell has made of them."""

import io
import os
import sys
from collections.abc import Sequence


def prepare_streams() -> None:
    """Replace closed streams, and let text that the locale cannot show be printed escaped.

    A closed stream leaves its number free: the next file would get it, and receive what is printed.
    """
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
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def flush(code: int) -> int:
    """Write what is still to be printed; return the exit code of the command.

    Returns:
        `code`, or 2 where the output cannot be written, such as to a full disk.
    """
    try:
        reader_has_gone()
    except OSError as error:
        print(f"The output cannot be written ({error.strerror}).", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    return code
