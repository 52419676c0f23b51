"""Opening the sweep that a verb names."""

from vitsweep.results.find import find_sweep
from vitsweep.results.store import Store


def open_reconciled(name: str) -> Store:
    """Open a sweep, and record what jobs of a cluster left behind that died: every cell has a row.

    Raises:
        VitsweepError: there is no such sweep.
    """
    from vitsweep.launchers.slurm.state.reconcile import reconcile

    store = find_sweep(name)
    reconcile(store)
    return store
