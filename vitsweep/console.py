"""What a command has of its shell: standard streams, the console for sentences and tables, and signals."""

import io
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from textwrap import wrap
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from vitsweep.errors import ExitCode

# The standard streams, whatever the shell has made of them, and what may be printed there.

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
    Warnings are printed as sentences, each once, without the lines of source that gave them.
    """
    noted = set[str]()

    def note(message: Warning | str, *_: object, **__: object) -> str:
        text = f"Note: {message}\n"
        is_new = text not in noted
        noted.add(text)
        return text * is_new

    warnings.formatwarning = note
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of libraries, as they are compiled
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(number, True)  # else the fork server of the ranks has none
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


# Where sentences and tables go.

WIDTH_IN_A_FILE = 160
"""A pipe or a log file has no width; rich would squeeze tables into 80 columns."""

SILENT_SECONDS = 10.0
"""After so long without a word a user wonders whether the command still runs."""


class CommandConsole(Console):
    """A console without which a command goes on: a sweep whose reader has gone (`| head`) is measured."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield the pieces of what is printed, their text escaped."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else shown(text), style, control)

    def on_broken_pipe(self) -> None:
        """Stop printing."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def open_console(*, stderr: bool = False) -> Console:
    """Return a console as wide as the terminal, or wide enough for a table elsewhere.

    Results go to stdout, progress and notes to stderr. Text is printed as it is: `[fp8]` is no style,
    and no number is coloured.
    """
    stream: Any = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else WIDTH_IN_A_FILE
    file = Styled(stream) if isinstance(stream, ShownStream) else None
    return CommandConsole(
        file=cast("IO[str] | None", file),
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        stderr=stderr,
    )


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print sentences; a terminal breaks them between words, but no command, which can be copied so."""
    for line in lines:
        text = _broken(line, console.width) if console.is_terminal else line
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _broken(text: str, width: int) -> str:
    whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", "\xa0"), text)
    lines = [
        wrap(line, width, break_long_words=False, break_on_hyphens=False)
        for line in whole.splitlines()
    ]
    return "\n".join("\n".join(line) for line in lines).replace("\xa0", " ")


def can_be_redrawn(console: Console) -> bool:
    """Tell whether lines on the screen can be replaced; in a pipe or with `TERM=dumb` they cannot."""
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def notebook_line() -> Iterator[Callable[[str], None]]:
    """Give one line of a notebook's output, whose text the next one replaces."""
    handle = import_module("IPython.display").display({"text/plain": ""}, raw=True, display_id=True)
    yield lambda text: handle.update({"text/plain": text}, raw=True)


@contextmanager
def periodic_status(
    show: Callable[[str], None], what: Callable[[], str], every_seconds: float = SILENT_SECONDS
) -> Iterator[None]:
    """Print what is going on in regular intervals until the block is left.

    Args:
        show: prints a line.
        what: returns the line; empty where there is nothing to say.
        every_seconds: length of the intervals.
    """
    left = threading.Event()

    def repeat() -> None:
        while not left.wait(every_seconds):
            if line := what():
                show(line)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()


def captured(command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Run another program, and return what it printed as text, whatever bytes these are.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: of `options`.
    """
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", **options
    )


TORCHAO_IMPORT = ("torchao", "torch.utils._pytree")
"""Loggers that warn on every import of torchao: of kernels for other GPUs, and of its own code."""


@contextmanager
def quiet_loggers(*names: str) -> Iterator[None]:
    """Keep loggers from printing warnings that no user can act upon; errors still appear."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# Ctrl-C and SIGTERM.

_signals: list[int] = []
ENDING = (signal.SIGTERM, signal.SIGUSR2)
"""Signals with which schedulers announce the end of a job; LSF sends SIGUSR2."""


@contextmanager
def interrupts_to(handler: Callable[..., object]) -> Iterator[None]:
    """Let `handler` take `ENDING` and Ctrl-C, which a shell's background jobs ignore."""

    def take(number: int, frame: object) -> None:
        _signals.append(number)
        handler(number, frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGINT)}
    if before[signal.SIGTERM] is signal.SIG_DFL:  # what came before was of another command
        _signals.clear()
    before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, take)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def was_terminated() -> bool:
    """Whether a scheduler ends this command: some seconds are left, which views and charts may take."""
    return any(number in _signals for number in ENDING)
