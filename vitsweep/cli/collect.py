"""`vitsweep collect`: the parquet and CSV files of a sweep, written anew."""

from collections.abc import Sequence

from vitsweep.cli.open_sweep import open_reconciled
from vitsweep.cli.options import Options
from vitsweep.cli.verbs import VERBS


def parser() -> Options:
    """Return the parser."""
    options = Options(VERBS["collect"])
    options.add_sweep()
    options.add_argument("--sync", action="store_true", help="upload its offline W&B runs")
    return options


def run(arguments: Sequence[str]) -> int:
    """Write the views of a sweep and show its table; return 0."""
    from vitsweep.console import open_console
    from vitsweep.report.views import collect
    from vitsweep.results.trackers import sync
    from vitsweep.tables.show import printed

    typed = parser().parse_args(arguments)
    store = open_reconciled(typed.sweep)
    if typed.sync:
        print(sync(store))
    open_console().print(printed(collect(store), title=f"Sweep {store.name}"))
    return 0
