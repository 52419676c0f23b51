"""The entry of the command line: what is typed after `python -m vitsweep`."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import vitsweep
from vitsweep.cli import VERBS
from vitsweep.console import interrupts_to, reader_has_gone, was_terminated
from vitsweep.errors import ExitCode, SweepStopped, VitsweepError, storage_error, storage_sentences
from vitsweep.job_environment import environment_rank
from vitsweep.results.provenance import trust_folders
from vitsweep.words import with_launcher_typed, without_units

TRUST = "--trust"
"""Does what the sweep folder of somebody else names, see `results.provenance`; of every command."""


def run(arguments: Sequence[str]) -> int:
    """Run what was typed and return the exit code; errors the user can fix print as sentences."""
    code = _run(arguments)
    return ExitCode.terminated if code == ExitCode.interrupted and was_terminated() else code


def _run(arguments: Sequence[str]) -> int:
    try:
        try:
            Path.cwd()
        except FileNotFoundError:
            gone = "The current folder was removed: `cd` to one that exists."
            raise VitsweepError(gone) from None
        if TRUST in arguments:
            trust_folders()
        return _dispatch([without_units(w) for w in arguments if w != TRUST])
    except VitsweepError as error:
        print(with_launcher_typed(str(error), arguments), file=sys.stderr)
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


def _dispatch(arguments: list[str]) -> int:
    """Run a verb, one rank that torchrun or srun started, or cells without a verb."""
    if arguments and arguments[0] in VERBS:
        with interrupts_to(signal.default_int_handler):
            return VERBS[arguments[0]].run(arguments[1:])
    if {"-h", "--help"} & set(arguments):
        from vitsweep.cli.show import menu, usage

        print(usage())
        print(menu())
        return ExitCode.ok
    if {"-sc", "--shell-completion"} & set(arguments):
        from vitsweep.composition.hydra import complete

        complete(VERBS)
        return ExitCode.ok
    if "--version" in arguments:
        print(f"vitsweep {vitsweep.__version__}")
        return ExitCode.ok
    place = environment_rank()
    if place is not None and place[2] > 1:  # one task alone is an interactive session of Slurm
        from vitsweep.cli.hydra_detour import run_part

        return run_part(arguments)  # SIGTERM ends it at once: others may hold it in a collective
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
    from vitsweep.cli.cells import read_line

    if (code := read_line(arguments).measured()) is not None:
        return code
    from vitsweep.cli.hydra_detour import run_hydra

    return run_hydra(arguments)
