"""Which sweeps there are under `results/`, and what a race wrote into one."""

import shlex
import sys
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.files import UnsafeFileError
from vitsweep.foreign import foreign
from vitsweep.results.store import Store

RESULTS = Path("results")
RACE = "race.json"
_OF_A_RACE = frozenset(
    "objective indifference error seconds num_runs grid_runs grid_blocks runner_up confirmed open".split()
)


def find_sweep(name: str | None) -> Store:
    """Open a sweep that exists.

    Args:
        name: a folder, or a name under `results/`; None for the sweep with the latest command, which
            is named on stderr.

    Raises:
        VitsweepError: there is no such sweep; the text lists those that there are.
    """
    names = sweep_names()
    if name is None and names:
        print(f"Sweep `{names[0]}`, the latest.", file=sys.stderr)
        return Store(RESULTS / names[0])
    for folder in (Path(name), RESULTS / name) if name else ():
        if (folder / "cells").is_dir():
            return Store(folder)
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


def read_race(folder: Path) -> dict[str, Any]:
    """Return what a race wrote into a sweep folder; {} where there was none.

    Raises:
        VitsweepError: the file is damaged.
    """
    path = folder / RACE
    try:
        document = foreign(path)
        cells = document.get("cells", [])
        is_whole = not cells or isinstance(document["num_blocks"], int)
        is_whole &= all(
            isinstance(cell["cell_id"], str)
            and isinstance(cell["name"], str)
            and all(isinstance(block, int) for block in cell["blocks"])
            for cell in cells
        )
        is_whole &= "leader" not in document or _OF_A_RACE <= document.keys()
    except FileNotFoundError:
        return {}
    except UnsafeFileError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        is_whole = False
    if not is_whole:
        raise VitsweepError(
            f"`{path}` is damaged. Restore it from a backup, or remove it: the same command writes it anew "
            "from the runs."
        )
    return dict(document)
