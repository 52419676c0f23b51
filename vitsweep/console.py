"""Where sentences and tables go."""

import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from textwrap import wrap
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from vitsweep.streams import ShownStream, Styled, shown

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
        """Print nothing any more."""
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
