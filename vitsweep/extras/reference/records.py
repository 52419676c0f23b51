"""Which cells of a sweep another machine has measured: `sweep.reference`, a sweep, a bundle or a table."""

import io
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vitsweep import extras
from vitsweep.errors import VitsweepError
from vitsweep.files import read_bytes
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.store import Store

if TYPE_CHECKING:
    from pandas import DataFrame

THREADS = "resources.threads_per_rank"
FACTS = {
    "device": str, "torch": str, "driver": str, "images_per_second": float, "sm_clock_mhz": float,
    "power_capped_share": float,
}  # fmt: skip
"""Column of a table of cells that is kept of a record -> its type."""
COLUMNS = ("cell_id", THREADS, *FACTS)
MOST_BYTES = 2**24
"""Of a CSV; a row takes some 100."""


def problems(named: str) -> list[str]:
    """Say why a value of `sweep.reference` is refused."""
    path = _path(named)
    if path.is_file() or (path / "cells").is_dir():
        try:
            records(named)
        except VitsweepError as error:
            return [f"`sweep.reference={named}`: {error}"]
        return []
    own = ", ".join(f"`{file.name[:-4]}`" for file in _here() if file.name.endswith(".csv"))
    return [
        f"`sweep.reference={named}` is neither the folder of a sweep, nor a bundle, nor a CSV, nor one of "
        f"the tables of vitsweep ({own}): correct it, or leave it out."
    ]


def _here() -> list[Any]:
    return sorted(files(__package__).iterdir(), key=lambda file: file.name)


def _path(named: str) -> Path:
    own = [file for file in _here() if file.name == f"{named}.csv"]
    return Path(str(own[0])) if own else Path(named)


def records(named: str) -> "DataFrame":
    """Return the measured cells of GPUs that `sweep.reference` names, a row each with `COLUMNS`.

    Raises:
        VitsweepError: it holds none, or is no such file.
    """
    import pandas as pd

    path = _path(named)
    if path.is_dir():
        return measured(Store(path))
    if path.suffix != ".csv":
        with TemporaryDirectory() as folder:
            unpack = extras.option("sweep.reference=BUNDLE")
            return measured(Store(unpack(path, Path(folder).resolve())))
    try:
        text = io.BytesIO(read_bytes(path, MOST_BYTES))
        return pd.read_csv(text, dtype={"cell_id": str, THREADS: int, **FACTS})[[*COLUMNS]]
    except (ValueError, LookupError) as error:
        raise VitsweepError(
            f"`{path}` must be a CSV with the columns {', '.join(COLUMNS)} ({error}): "
            "`python -m analysis.reference FOLDER CSV` writes one."
        ) from error


def measured(store: Store) -> "DataFrame":
    """Return the measured cells of GPUs of a sweep, a row each with `COLUMNS`.

    Raises:
        VitsweepError: it has none.
    """
    from vitsweep.results.record import Status
    from vitsweep.tables.sweep_tables import SweepTables

    cells = SweepTables.of(store).cells.reindex(columns=[*COLUMNS, "status", "device_type"])
    found = cells[(cells["status"] == Status.measured) & (cells["device_type"] == "cuda")]
    if found.empty:
        raise VitsweepError(
            f"`{store.root}` has no measured cell of a GPU to compare with: name another sweep, or `h200`."
        )
    return found[[*COLUMNS]].astype({THREADS: int}).reset_index(drop=True)


def kept(plan: SweepPlan, named: str) -> list[dict[str, Any]]:
    """Return what the line of a command keeps: of each cell that was measured there, the record.

    A cell matches by its id, with the threads of the record's: these follow the cores of a host.

    Args:
        plan: the cells of the command.
        named: `sweep.reference`.
    """
    rows = records(named).to_dict("records")
    by_id = {row["cell_id"]: row for row in rows}
    found = []
    for cell_id, entry in plan.entries.items():
        resources = entry.spec.resources
        for threads in {row[THREADS] for row in rows}:
            alike = replace(entry.spec, resources=replace(resources, threads_per_rank=threads))
            if row := by_id.get(alike.cell_id):
                known = {key: row[key] for key in FACTS if row[key] == row[key]}
                found.append({"cell_id": cell_id, "source": named, **known})
    return found
