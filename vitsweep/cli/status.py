"""`vitsweep status`: the jobs and cells of a submitted sweep, from any terminal."""

from collections.abc import Sequence

from vitsweep.cli.options import Options
from vitsweep.cli.verbs import VERBS


def parser() -> Options:
    """Return the parser."""
    options = Options(VERBS["status"])
    options.add_sweep()
    options.add_argument("--watch", action="store_true", help="until nothing runs any more")
    return options


def run(arguments: Sequence[str]) -> int:
    """Show jobs and cells; return 3 where nothing runs any more and cells were not measured."""
    typed = parser().parse_args(arguments)
    from vitsweep.console import open_console
    from vitsweep.launchers.slurm.state.job_control import status
    from vitsweep.results.find import find_sweep

    return status(find_sweep(typed.sweep), typed.watch, open_console())
