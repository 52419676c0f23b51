"""`vitsweep collect`: the parquet and CSV files of a sweep, written anew."""

from collections.abc import Sequence

from vitsweep.cli.options import Options
from vitsweep.cli.verbs import VERBS


def parser() -> Options:
    """Return the parser."""
    options = Options(VERBS["collect"])
    options.add_sweep()
    options.add_argument(
        "--reconcile",
        action="store_true",
        help="first record runs that jobs did not finish which Slurm no longer has",
    )
    options.add_argument("--sync", action="store_true", help="upload its offline W&B runs")
    return options


def run(arguments: Sequence[str]) -> int:
    """Write the views of a sweep and show its table; return 0."""
    typed = parser().parse_args(arguments)
    from vitsweep.console import open_console
    from vitsweep.launchers.slurm.state.job_control import reconcile_hint
    from vitsweep.launchers.slurm.state.poll import poll
    from vitsweep.launchers.slurm.state.reconcile import reconcile
    from vitsweep.report.views import collect
    from vitsweep.results.find import find_sweep
    from vitsweep.results.trackers import sync
    from vitsweep.tables.show import printed

    store = find_sweep(typed.sweep)
    if typed.reconcile:
        reconcile(store)
    if typed.sync:
        print(sync(store))
    console = open_console()
    console.print(printed(collect(store), title=f"Sweep {store.name}"))
    if hint := reconcile_hint(store, poll(store)):
        console.print(hint, highlight=False)
    return 0
