"""The entry point: a verb, or overrides that compose and run cells."""

import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import vitsweep
from vitsweep.cli.verbs import VERBS
from vitsweep.errors import (
    ExitCode,
    SweepStopped,
    VitsweepError,
    interrupts_to,
    storage_error,
    storage_sentences,
    was_terminated,
)
from vitsweep.results.provenance import trust_folders

# The standard streams of a command, whatever the shell has made of them.


def prepare_streams() -> None:
    """Replace closed streams, and let text that the locale cannot show be printed escaped.

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


TRUST = "--trust"
"""Does what the sweep folder of somebody else names, see `results.provenance`; of every command."""


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run what was typed and return the exit code; errors the user can fix print as sentences."""
    code = _run(arguments, environment)
    return ExitCode.terminated if code == ExitCode.interrupted and was_terminated() else code


def _run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    try:
        _require_folder()
        if TRUST in arguments:
            trust_folders()
        return _dispatch([word for word in arguments if word != TRUST], environment)
    except VitsweepError as error:
        print(error, file=sys.stderr)
        return ExitCode.bad_input
    except OSError as error:
        if isinstance(error, BrokenPipeError) and reader_has_gone():
            return ExitCode.ok
        if isinstance(error, PermissionError) and error.filename:
            print(
                f"`{error.filename}`: {error.strerror}. Nothing that was measured has changed; its owner "
                "can type this, or you in a copy of the sweep's folder.",
                file=sys.stderr,
            )
            return ExitCode.bad_input
        failed = storage_error(error)
        if failed is None:
            raise
        print(storage_sentences(failed), file=sys.stderr)
        return ExitCode.bad_input
    except SweepStopped:
        return ExitCode.interrupted
    except KeyboardInterrupt:
        print("Stopped. What was measured is kept; the same command continues.", file=sys.stderr)
        return ExitCode.interrupted
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else ExitCode.ok


def _require_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise VitsweepError("The current folder was removed: `cd` to one that exists.") from None


def _dispatch(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Run a verb, a part of a cell, or what stands without a verb."""
    if arguments and arguments[0] in VERBS:
        with interrupts_to(signal.default_int_handler):
            return VERBS[arguments[0]].run(arguments[1:])
    if {"-h", "--help"} & set(arguments):
        return _help()
    if "--version" in arguments:
        print(f"vitsweep {vitsweep.__version__}")
        return ExitCode.ok
    if _asks_for_completion(arguments):
        return _complete()
    from vitsweep.world import environment_rank

    place = environment_rank()
    if place is not None and place[2] > 1:  # one task alone is an interactive session of Slurm
        return _run_rank(
            arguments
        )  # SIGTERM ends it at once: other ranks may hold it in a collective
    with interrupts_to(signal.default_int_handler):
        return measure_cells(arguments)


def measure_cells(arguments: Sequence[str]) -> int:
    """Measure what is missing of the cells that are typed, and show all; one cell is a sweep of one.

    Returns:
        0, or 3 where cells were not measured.

    Raises:
        VitsweepError: what was typed is wrong.
        SweepStopped: the user stopped it.
    """
    from vitsweep.api.session import NotOursError
    from vitsweep.cli.cells import finish, read_line

    line = read_line(arguments)
    if not line.of_hydra:
        try:
            return finish(line.session())
        except NotOursError:
            pass
    from vitsweep.cli.hydra_detour import run_hydra

    return run_hydra(arguments)


def _asks_for_completion(arguments: Sequence[str]) -> bool:
    """Tell whether the Tab key asks, through a script that Hydra wrote."""
    return bool({"-sc", "--shell-completion"} & set(arguments)) and any(
        "query=" in word for word in arguments
    )


def _run_rank(arguments: Sequence[str]) -> int:
    """Run this process's part of a cell; rank 0 shows its row and where it is kept."""
    from vitsweep.launchers.external_ranks import run_in_place

    measured = run_in_place(arguments)
    if measured is None:
        return ExitCode.ok
    result, settings = measured
    from vitsweep.cli.summary import exit_code, summarize
    from vitsweep.console import open_console
    from vitsweep.launchers.base import locked

    console = open_console()
    with locked(result.store, console):
        return exit_code(summarize(result, console, with_report=settings.report))


def _complete() -> int:
    """Answer the Tab key, on behalf of a script that Hydra wrote."""
    from vitsweep.cli.show import suggestions, typed_line

    print("\n".join(suggestions(typed_line())))
    return ExitCode.ok


def _help() -> int:
    from vitsweep.cli.show import menu, usage

    print(usage())
    print(menu())
    return ExitCode.ok
