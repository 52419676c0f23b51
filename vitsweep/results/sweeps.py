"""Which sweeps there are under `results/`, and which one a command holds."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vitsweep.errors import VitsweepError
from vitsweep.results import lease
from vitsweep.results.store import Store

if TYPE_CHECKING:
    from rich.console import Console

RESULTS = Path("results")


def find_sweep(name: str | None) -> Store:
    """Open a sweep that exists.

    Args:
        name: a folder, or a name under `results/`; None for the sweep with the latest command, which
            is named on stderr.

    Raises:
        VitsweepError: there is no such sweep, and the text lists those that there are; or the folder is none.
    """
    names = sweep_names()
    if name is None and names:
        print(f"Sweep `{names[0]}`, the latest.", file=sys.stderr)
        return Store(RESULTS / names[0])
    folders = [f for f in (Path(name), RESULTS / name) if f.is_dir()] if name else []
    for folder in folders:
        if (folder / "cells").is_dir():
            return Store(folder)
    if folders:
        raise VitsweepError(f"`{folders[0]}` is no sweep: the folder has no cells (`cells/`).")
    which = f"sweep `{name}`" if name else "sweep"
    listed = ", ".join(f"`{known}`" for known in sorted(names))
    raise VitsweepError(
        f"There is no {which} under `{RESULTS}/`, which holds {listed}."
        if names
        else f"There is no {which}: `{RESULTS}/` in this folder holds none yet."
    )


def sweep_argument(store: Store) -> str:
    """Return what to type for a sweep: its name, or its folder where that is not in `results/`."""
    is_here = store.root.parent.resolve() == RESULTS.resolve()
    return shlex.quote(store.name if is_here else str(store.root))


def sweep_names() -> list[str]:
    """Return the names of the sweeps under `results/`, that of the latest command first."""

    def last_command(folder: Path) -> float:
        commands = folder / "commands.jsonl"
        return (commands if commands.exists() else folder).stat().st_mtime

    folders = [path.parent for path in RESULTS.glob("*/cells")]
    return [folder.name for folder in sorted(folders, key=last_command, reverse=True)]


@contextmanager
def held(store: Store, console: "Console") -> Iterator[None]:
    """Hold the sweep folder; say so where another command has it and this one must wait."""
    said = f"Another command is using `{store.root}`; waiting for it to end."
    with store.lock(on_wait=lambda: console.print(said)):
        yield


@contextmanager
def only_rounds(store: Store) -> Iterator[None]:
    """Be the only command that chooses rounds in a sweep, until the block ends or the process dies.

    Raises:
        VitsweepError: another one does. Two would choose from each other's fresh runs.
    """

    def refuse() -> None:
        raise VitsweepError(
            f"Another command chooses the rounds of `{store.root}`: wait for it, or end it with "
            "Ctrl-C and type this one, which goes on."
        )

    with lease.held(store.root / ".race.lock", refuse):
        yield
