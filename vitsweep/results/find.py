"""Where the sweeps are that a command names."""

from pathlib import Path
from typing import TYPE_CHECKING

from vitsweep.errors import VitsweepError

if TYPE_CHECKING:
    from vitsweep.results.store import Store

RESULTS = Path("results")


def find_sweep(name: str) -> "Store":
    """Open a sweep that exists.

    Args:
        name: a folder, or a name under `results/`.

    Raises:
        VitsweepError: there is no such sweep; the text lists those that there are.
    """
    from vitsweep.results.store import Store

    for folder in (Path(name), RESULTS / name):
        if (folder / "cells").is_dir():
            return Store(folder)
    names = ", ".join(f"`{known}`" for known in sweep_names())
    raise VitsweepError(
        f"There is no sweep `{name}` under `{RESULTS}/`, which holds {names}."
        if names
        else f"There is no sweep `{name}`: `{RESULTS}/` in this folder holds none yet."
    )


def sweep_names() -> list[str]:
    """Return the names of the sweeps under `results/`."""
    return sorted(path.parent.name for path in RESULTS.glob("*/cells"))
