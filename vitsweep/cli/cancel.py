"""`vitsweep cancel`: the end of a sweep's jobs."""

from collections.abc import Sequence

from vitsweep.cli import VERBS, Options
from vitsweep.console import open_console
from vitsweep.extras import OPTIONS, load
from vitsweep.launchers.slurm.state.status import cancel
from vitsweep.results.sweeps import find_sweep


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()


def run(arguments: Sequence[str]) -> int:
    """End the jobs of a sweep; what was measured is kept."""
    store = find_sweep(VERBS["cancel"].read(arguments).sweep)
    if "cancel" in OPTIONS:
        load(OPTIONS["cancel"])(store)
    return cancel(store, open_console())
