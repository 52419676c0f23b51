"""The machine's own rates, measured once per world before its first cell."""

import time
from typing import Any

from vitsweep.results.store import Store, append_line, read_lines, write_atomically
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.sweep.ranks import fork_server, rendezvous

SECONDS_AT_MOST = 120
SAME_ALLOCATION_S = 3600
"""A calibration older than this is taken again: another load, another clock."""


def calibration_for(cell: CellSpec, store: Store, host: str) -> dict[str, float]:
    """Return matmul TFLOP/s by dtype and all-reduce GB/s for the cell's ranks on this machine.

    Measured if the sweep folder holds none of the last hour. {} where it fails: the cells then run
    without a denominator.
    """
    resources = cell.resources
    key = f"{host} {resources.device} {resources.world_size}x{resources.threads_per_rank}"
    path = store.root / "machine.jsonl"
    for known in reversed(read_lines(path)):
        if known["key"] == key and time.time() - known["time"] < SAME_ALLOCATION_S:
            return dict(known["rates"])
    rates = _measure(cell, store)
    if rates:
        append_line(path, {"key": key, "time": time.time(), "rates": rates})
    return rates


def _measure(cell: CellSpec, store: Store) -> dict[str, float]:
    answer = store.root / ".calibration.json"
    answer.unlink(missing_ok=True)
    with rendezvous() as init_method:
        processes = [
            fork_server().Process(
                target=calibrate_rank, args=(cell, rank, init_method, str(answer)), daemon=True
            )
            for rank in range(cell.resources.world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + SECONDS_AT_MOST
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.join()
    found = read_lines(answer)
    answer.unlink(missing_ok=True)
    return dict(found[0]) if found else {}


def calibrate_rank(cell: CellSpec, rank: int, init_method: str, answer: str) -> None:
    """One rank of a calibration; rank 0 leaves the answer in a file."""
    import json
    from pathlib import Path

    from vitsweep.measure.calibrate import calibrate
    from vitsweep.sweep.worker import joined_world

    with joined_world(cell, rank, rank, init_method) as world:
        rates: dict[str, Any] = calibrate(world)
        if rank == 0:
            write_atomically(Path(answer), json.dumps(rates))
