"""Packing the cells of a sweep that nothing measures, when their files have become many."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

from rich.console import Console

from vitsweep.errors import VitsweepError
from vitsweep.execution.attempts import unfinished
from vitsweep.launchers.slurm.state.poll import poll
from vitsweep.results import pack
from vitsweep.results.store import Store
from vitsweep.results.sweeps import held
from vitsweep.tables.formatting import count


def pack_ended(store: Store) -> tuple[int, int]:
    """Pack the cells that nothing measures; the caller holds the folder.

    Returns:
        How many files moved, and how many cells stayed as they are.

    Raises:
        OSError: the pack cannot be written.
    """
    live = {run.cell_id for state in poll(store) if state.is_live for run in state.job.runs()}
    live |= {cell_id for cell_id in store.folders() if unfinished(store, cell_id)}
    return store.pack(live), len(live)


def keep_few_files(store: Store, console: Console, *, is_held: bool = True) -> None:
    """Pack what has ended where the files of cells are many; what cannot be packed stays as it is.

    Args:
        store: of the sweep.
        console: says what moved.
        is_held: whether the caller holds the folder; else it is left to a command that does.
    """

    def leave() -> None:
        raise VitsweepError("It packs at its end.")

    if not store.has_many_files():
        return
    with suppress(OSError, VitsweepError), nullcontext() if is_held else store.lock(leave):
        if moved := pack_ended(store)[0]:
            text = f"{count(moved, 'file')} of cells moved into `{store.cells / pack.FILE}`."
            console.print(text)


@contextmanager
def locked(store: Store, console: Console) -> Iterator[None]:
    """Hold the sweep folder; at the end many files of cells become few."""
    with held(store, console):
        yield
        keep_few_files(store, console)
