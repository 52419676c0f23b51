"""The entry point: a verb, or overrides that compose and run cells."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import vitsweep
from vitsweep.cli.hydra_entry import asks_for_completion, run_hydra
from vitsweep.cli.streams import reader_has_gone
from vitsweep.cli.verbs import VERBS
from vitsweep.errors import ExitCode, SweepStopped, VitsweepError, disk_full_error


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run what was typed and return the exit code; errors the user can fix print as sentences."""
    try:
        _require_folder()
        return _dispatch(list(arguments), environment)
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
        full = disk_full_error(error)
        if full is None:
            raise
        what = f"`{full.filename}`" if full.filename else "The output or the results folder"
        print(
            f"{what} cannot be written ({full.strerror}). What was measured is kept: make room and "
            "type the same command again.",
            file=sys.stderr,
        )
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
    """Take verbs off before Hydra's parser sees the line: it would refuse `plan -m ...`."""
    if arguments and arguments[0] in VERBS:
        return VERBS[arguments[0]].run(arguments[1:])
    if {"-h", "--help"} & set(arguments):
        return _help()
    if "--version" in arguments:
        print(f"vitsweep {vitsweep.__version__}")
        return ExitCode.ok
    if asks_for_completion(arguments):
        return _complete()
    from vitsweep.world import environment_rank

    place = environment_rank()
    if place is not None and place[2] > 1:  # one task alone is an interactive session of Slurm
        return _run_rank(arguments)
    return run_hydra(arguments)


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
    from vitsweep.cli.completion import suggestions, typed_line

    print("\n".join(suggestions(typed_line())))
    return ExitCode.ok


def _help() -> int:
    from vitsweep.cli.help import menu, usage

    print(usage())
    print(menu())
    return ExitCode.ok
