"""Races in Python: `vitsweep.race`, and `race` of a sweep."""

from typing import Any

from pandas import DataFrame

from vitsweep.api.functions import WAIT, positive, sweep
from vitsweep.api.session import Overrides, as_overrides, refuse_second
from vitsweep.api.sweep import Sweep
from vitsweep.composition.overrides import value_override
from vitsweep.extras.race.table import race_table, read_race
from vitsweep.results.store import Store


def race(overrides: Overrides = (), *, minutes: float | None = None, **arguments: Any) -> Sweep:
    """Find the fastest of many combinations without measuring all of them equally often.

    Args:
        overrides: the grid, as for `sweep`.
        minutes: budget; None races down to the last cells.
        arguments: further arguments of `sweep`. With `launcher="slurm"` the call waits for its jobs.

    Returns:
        The sweep, as `sweep` does; `Sweep.race` is the table of the race.

    Raises:
        VitsweepError: as `sweep` does.
    """
    texts = as_overrides(overrides, {})
    added = ["sweep.search=race"]
    if minutes is not None:
        added.append(value_override("sweep.minutes", positive("minutes", minutes)))
    for text in added:
        refuse_second(texts, text)
    if arguments.get("launcher") == "slurm" and not any(t.startswith(f"{WAIT}=") for t in texts):
        added.append(f"{WAIT}=true")  # each round is chosen from the runs of those before
    return sweep([*texts, *added], **arguments)


def race_of(store: Store) -> DataFrame:
    """Return how a race went: when and why each cell was dropped; empty where there was no race."""
    found = read_race(store.root)
    return race_table(found) if found else DataFrame()
