"""The machine's own rates, measured once per world before its first cell."""

import json
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitsweep.execution.rank_processes import (
    LocalRanks,
    Ranks,
    Start,
    fork_server,
    rendezvous,
    wait_for_all,
)
from vitsweep.results.store import Store, append_line, read_lines, write_atomically
from vitsweep.spec.cell_spec import CellSpec

SECONDS_AT_MOST = 120
SAME_ALLOCATION_S = 3600
"""A calibration older than this is taken again: another load, another clock."""


def start_here(cell: CellSpec, init_method: str, answer: Path) -> Ranks:
    """Start all ranks of a calibration on this machine."""
    told, everyone = (cell, init_method, str(answer)), range(cell.resources.world_size)
    return LocalRanks(fork_server(), calibrate_rank, told, everyone, answer.parent)


def calibration_for(cell: CellSpec, store: Store, host: str) -> dict[str, float]:
    """Return matmul TFLOP/s by dtype and all-reduce GB/s for the cell's ranks on this machine.

    Measured if the sweep folder holds none of the last hour. {} where it fails: the cells then run
    without a denominator.
    """
    key, path = calibration_key(cell, host), store.root / "machine.jsonl"
    for known in reversed(read_lines(path)):
        if known["key"] == key and time.time() - known["time"] < SAME_ALLOCATION_S:
            return dict(known["rates"])
    with rendezvous() as init_method:
        rates = calibrated(cell, store.root, init_method)
    if rates:
        append_line(path, {"key": key, "time": time.time(), "rates": rates})
    return rates


def calibration_key(cell: CellSpec, host: str) -> str:
    """What the rates of two cells must share."""
    resources = cell.resources
    return f"{host} {resources.device} {resources.world_size}x{resources.threads_per_rank}"


def calibrated(
    cell: CellSpec, folder: Path, init_method: str, start: Start = start_here
) -> dict[str, float]:
    """Measure the rates now; {} where it fails.

    Args:
        cell: its ranks, threads and mesh are used.
        folder: where rank 0 may leave its answer.
        init_method: rendezvous of the ranks.
        start: starts the ranks, here or on the nodes of an allocation.
    """
    answer = folder / f".calibration-{secrets.token_hex(4)}.json"
    ranks = start(cell, init_method, answer)
    try:
        wait_for_all(ranks, SECONDS_AT_MOST, grace_seconds=1.0)
    finally:
        ranks.kill()
    rates: dict[str, float] = {}
    with suppress(OSError, ValueError):
        rates = json.loads(answer.read_text())
    answer.unlink(missing_ok=True)
    return rates


def calibrate_rank(
    cell: CellSpec, init_method: str, answer: str, rank: int, local_rank: int
) -> None:
    """One rank of a calibration; rank 0 leaves the answer in a file."""
    from vitsweep.execution.worker import joined_world
    from vitsweep.measure.calibrate import calibrate

    with joined_world(cell, rank, local_rank, init_method) as world:
        rates: dict[str, Any] = calibrate(world)
        if rank == 0:
            write_atomically(Path(answer), json.dumps(rates))
