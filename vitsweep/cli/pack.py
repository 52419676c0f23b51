"""`vitsweep pack`: the files of a sweep's cells in one file, for file systems that count them."""

from collections.abc import Sequence

from vitsweep.cli import VERBS, Options
from vitsweep.errors import VitsweepError
from vitsweep.execution.attempts import unfinished
from vitsweep.launchers.slurm.state.poll import poll
from vitsweep.results import pack
from vitsweep.results.store import Store
from vitsweep.results.sweeps import find_sweep
from vitsweep.tables.formatting import count


def add_options(options: Options) -> None:
    """Add what may follow the verb."""
    options.add_sweep()


def run(arguments: Sequence[str]) -> int:
    """Pack all cells but those that jobs still measure; return 0.

    Raises:
        VitsweepError: a command is at work in the sweep, or the pack cannot be written.
    """
    typed = VERBS["pack"].read(arguments)
    store = find_sweep(typed.sweep)

    def refuse() -> None:
        raise VitsweepError(f"A command is at work in `{store.root}`: pack it when that has ended.")

    with store.lock(refuse):
        try:
            moved, num_left = pack_ended(store)
        except OSError as error:
            raise VitsweepError(
                f"`{store.cells / pack.FILE}` cannot be written ({error.strerror}): what was not packed "
                "stays as it is."
            ) from error
    left = (
        f" {count(num_left, 'cell')} of waiting and running jobs stayed as they are."
        if num_left
        else ""
    )
    print(f"{count(moved, 'file')} moved into `{store.cells / pack.FILE}`.{left}")
    return 0


def pack_ended(store: Store) -> tuple[int, int]:
    """Pack the cells that nothing measures; the caller holds the lock of the sweep.

    Returns:
        How many files moved, and how many cells stayed as they are.

    Raises:
        OSError: the pack cannot be written.
    """
    live = {run.cell_id for state in poll(store) if state.is_live for run in state.job.runs()}
    live |= {cell_id for cell_id in store.folders() if unfinished(store, cell_id)}
    return store.pack(live), len(live)
