"""`vitsweep cancel`: the end of a sweep's jobs."""

from collections.abc import Sequence

from vitsweep.cli.verbs import VERBS, Options


def parser() -> Options:
    """Return the parser."""
    options = Options(VERBS["cancel"])
    options.add_sweep()
    return options


def run(arguments: Sequence[str]) -> int:
    """End the jobs of a sweep; what was measured is kept."""
    typed = parser().parse_args(arguments)
    from vitsweep.console import open_console
    from vitsweep.launchers.slurm.state.status import cancel
    from vitsweep.results.store import find_sweep

    return cancel(find_sweep(typed.sweep), open_console())
