"""The verbs of the command line, taken off before Hydra's parser sees the rest."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import vitsweep
from vitsweep.cli.hydra_entry import asks_for_completion, run_hydra
from vitsweep.cli.verbs import parser_of
from vitsweep.errors import VitsweepError
from vitsweep.results.find import find_sweep

if TYPE_CHECKING:
    from vitsweep.results.store import Store

USAGE = """\
vitsweep: sweep the techniques that make Vision-Transformer training fast, and trust the numbers.

  python -m vitsweep precision=O2 sharding=fsdp              one cell, here
  python -m vitsweep -m precision=O1,O2 sharding=ddp,fsdp    a sweep of four, and their baseline
  python -m vitsweep plan -m ...      what a sweep would run, what is invalid and why, what is known
  python -m vitsweep report [SWEEP]   tables, charts and one HTML page of a sweep
  python -m vitsweep collect [SWEEP] [--sync]   write parquet and CSV anew, show the table; upload W&B runs
  python -m vitsweep status [SWEEP] [--watch]   how a submitted sweep is, from any terminal
  python -m vitsweep cancel [SWEEP]   end its jobs; what was measured stays
  python -m vitsweep retry [SWEEP] [--status failed,timed_out] [--set key=value]
                                      run cells again that ended otherwise
  python -m vitsweep compare A B [override ...] [--width 0.05] [--minutes 30]
                                      two settings in turns until the interval on their ratio is narrow
  python -m vitsweep gate [SWEEP] --against KEPT [--tolerance 0.05] [--metric img/s,speedup]
                                      ends with 1 if a cell became worse than a kept baseline
  python -m vitsweep doctor           what this machine can do
  eval "$(vitsweep -sc install=bash)" completion by the Tab key, also for zsh and fish: README

SWEEP is a name under results/ or a folder; `sweep.name=NAME` chooses it when cells run.
Keys are set as group.key=value, swept as group.key=a,b or group.key=range(1,4).
"""

Verb = Callable[[Sequence[str]], int]


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run what was typed and return the exit code; mendable errors print as sentences."""
    try:
        return _dispatch(list(arguments), environment)
    except VitsweepError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _dispatch(arguments: list[str], environment: Mapping[str, str]) -> int:
    verbs = _verbs()
    if arguments and arguments[0] in verbs:
        return verbs[arguments[0]](arguments[1:])
    if {"-h", "--help"} & set(arguments):
        return _help()
    if "--version" in arguments:
        print(f"vitsweep {vitsweep.__version__}")
        return 0
    if asks_for_completion(arguments):
        return _complete()
    from vitsweep.world import environment_rank

    place = environment_rank()
    if place is not None and place[2] > 1:  # a task alone is an interactive session of Slurm
        from vitsweep.launchers.external_ranks import run_in_place

        return run_in_place(arguments)
    return run_hydra(arguments)


def _verbs() -> dict[str, Verb]:
    return {
        "plan": plan,
        "status": status,
        "collect": collect,
        "report": report,
        "retry": retry,
        "cancel": cancel,
        "compare": compare,
        "gate": gate,
        "doctor": doctor,
    }


def plan(arguments: Sequence[str]) -> int:
    """List cells as runnable, invalid or measured already; nothing is trained."""
    if {"-h", "--help"} & set(arguments):
        parser_of("plan").print_help()
        return 0
    rest = [a for a in arguments if a not in ("-m", "--multirun")]
    return run_hydra(["--multirun", *rest, "hydra.sweeper.plan_only=true"])


def report(arguments: Sequence[str]) -> int:
    """Write the report of a sweep folder."""
    from vitsweep.report.html import write_report
    from vitsweep.report.views import collect as collect_views

    store = _settled(parser_of("report").parse_args(arguments).sweep)
    collect_views(store)
    print(write_report(store))
    return 0


def collect(arguments: Sequence[str]) -> int:
    """Write the views of a sweep folder anew and show its table; `--sync` uploads its W&B runs."""
    from vitsweep.console import open_console
    from vitsweep.report.views import collect as collect_views
    from vitsweep.results.trackers import sync
    from vitsweep.tables.show import printed

    asked = parser_of("collect").parse_args(arguments)
    store = _settled(asked.sweep)
    if asked.sync:
        print(sync(store))
    open_console().print(printed(collect_views(store), title=f"Sweep {store.name}"))
    return 0


def retry(arguments: Sequence[str]) -> int:
    """Run cells of a sweep again that ended otherwise."""
    from vitsweep.cli.retry import retries
    from vitsweep.cli.retry_options import retry_options
    from vitsweep.cli.summary import INTERRUPTED

    commands, worst = retries(retry_options(arguments)), 0
    if not commands:
        print("No cell ended so: there is nothing to run again.")
    for command in commands:
        try:
            worst = max(worst, run_hydra(command))
        except SystemExit as left:  # of each command: 3 where cells ended otherwise again
            worst = max(worst, int(left.code or 0))
            if left.code == INTERRUPTED:
                break
    return worst


def status(arguments: Sequence[str]) -> int:
    """Show the jobs and cells of a sweep; with `--watch` until nothing runs any more."""
    from vitsweep.console import open_console
    from vitsweep.launchers.slurm.state.job_control import status as show

    asked = parser_of("status").parse_args(arguments)
    return show(find_sweep(asked.sweep), asked.watch, open_console())


def cancel(arguments: Sequence[str]) -> int:
    """End the jobs of a sweep."""
    from vitsweep.console import open_console
    from vitsweep.launchers.slurm.state.job_control import cancel as end_jobs

    asked = parser_of("cancel").parse_args(arguments)
    return end_jobs(find_sweep(asked.sweep), open_console())


def compare(arguments: Sequence[str]) -> int:
    """Measure two settings in turns until the interval on their ratio is narrow enough."""
    from vitsweep.launchers.paired_comparison import compare as measure

    return measure(arguments)


def gate(arguments: Sequence[str]) -> int:
    """Compare a sweep with a kept baseline; 1 where a cell became worse beyond the tolerance."""
    from vitsweep.cli.gate_options import gate_options
    from vitsweep.report.gate import gate as judge
    from vitsweep.tables.load import load

    options = gate_options(arguments)
    store, kept = _settled(options.sweep), Path(options.against)
    if kept.suffix == ".parquet" and not kept.is_file():
        raise VitsweepError(
            f"There is no kept baseline `{kept}`. Keep one: `cp {store.root}/runs.parquet {kept}`."
        )
    verdict = judge(
        load(store, rows="runs"),
        load(kept if kept.is_file() else find_sweep(options.against), rows="runs"),
        tolerance=options.tolerance,
        metrics=options.metrics,
        baselines=store.baselines(),
        mixed_hardware=options.mixed_hardware,
    )
    print("\n".join(verdict.sentences))
    if not verdict.num_compared:
        raise VitsweepError(
            f"Nothing could be compared, so the gate says nothing about `{options.sweep}`."
        )
    print(verdict.verdict)
    return 0 if verdict.passed else 1


def doctor(arguments: Sequence[str]) -> int:
    """Say what this machine can do, what is missing, and how to get it."""
    from vitsweep.cli.doctor import examine

    parser_of("doctor").parse_args(arguments)
    return examine()


def _settled(name: str) -> "Store":
    """Open a sweep and record what dead jobs of a cluster left, so that every cell has its row."""
    from vitsweep.launchers.slurm.state.reconcile import reconcile

    store = find_sweep(name)
    reconcile(store)
    return store


def _complete() -> int:
    """Answer the Tab key, for which a script asks that Hydra wrote."""
    from vitsweep.cli.completion import asked_line, suggestions

    print("\n".join(suggestions(asked_line())))
    return 0


def _help() -> int:
    from vitsweep.cli.menu import menu

    print(USAGE)
    print(menu())
    return 0
