"""Start the ranks that measure quick rates, before the first cell of each rank count."""

import json
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitsweep.execution.process import end_with_launcher, exit_now
from vitsweep.execution.rank_processes import (
    LocalRanks,
    Ranks,
    StartRanks,
    fork_server,
    rendezvous,
    wait_for_ranks,
)
from vitsweep.files import write_atomically
from vitsweep.rates.calibration import kept_calibration
from vitsweep.rates.profile import device_name
from vitsweep.spec.cell_spec import CellSpec

START_S = 480
"""For the processes to import torch and NCCL to connect all ranks, which takes minutes on many nodes."""
TIMEOUT_S = START_S + 120
"""Of a calibration, its start included."""


def start_local_calibration(cell: CellSpec, init_method: str, answer: Path) -> Ranks:
    """Start all ranks of a calibration on this machine."""
    arguments, ranks = (cell, init_method, str(answer)), range(cell.resources.world_size)
    return LocalRanks(fork_server(), calibrate_rank, arguments, ranks, answer.parent)


def calibration_for(
    cell: CellSpec, folder: Path, host: str, on_wait: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Return the rates of the cell's ranks on this machine (see `rates.operators.calibrate`).

    They are measured unless the device's calibration holds some of the last hour. If that fails they are
    {}: cells still run, and columns relative to a measured rate are empty.

    Args:
        cell: its ranks, threads and mesh are used.
        folder: where rank 0 may write a temporary file.
        host: name of this machine.
        on_wait: called about five times a second while they are measured; may raise.
    """
    device, key = str(device_name(cell.resources.device)), calibration_key(cell, host)
    with suppress(ValueError):
        if known := kept_calibration(device).quick_rates(key):
            return known
    with rendezvous() as init_method:
        rates = calibrated(cell, folder, init_method, on_wait=on_wait)
    if rates:
        with suppress(ValueError):  # the file is damaged: nothing is kept there
            kept_calibration(device).keep_quick(key, rates)
    return rates


def calibration_key(cell: CellSpec, host: str) -> str:
    """Return what two cells must have in common to share a calibration."""
    resources = cell.resources
    return f"{host} {resources.device} {resources.world_size}x{resources.threads_per_rank}"


def calibrated(
    cell: CellSpec,
    folder: Path,
    init_method: str,
    start: StartRanks = start_local_calibration,
    on_wait: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Measure the rates now; return {} if that fails.

    Args:
        cell: its ranks, threads and mesh are used.
        folder: where rank 0 may write a temporary file.
        init_method: rendezvous of the ranks.
        start: starts the ranks, on this machine or on the nodes of an allocation.
        on_wait: called about five times a second while they run; may raise.
    """
    answer = folder / f".calibration-{secrets.token_hex(4)}.json"
    ranks = start(cell, init_method, answer)
    try:
        wait_for_ranks(ranks, TIMEOUT_S, grace_seconds=1.0, on_wait=on_wait)
    finally:
        ranks.kill()
    rates: dict[str, float] = {}
    with suppress(OSError, ValueError):
        rates = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink(missing_ok=True)
    return rates


def calibrate_rank(
    cell: CellSpec, init_method: str, answer: str, rank: int, local_rank: int
) -> None:
    """Run one rank of a calibration; rank 0 writes the rates as JSON to the file `answer`."""
    from vitsweep.execution.process import joined_process_group
    from vitsweep.rates.operators import calibrate

    end_with_launcher()
    own_limit = replace(cell.measurement, timeout_min=TIMEOUT_S / 60)  # not that of the cell's runs
    try:
        with joined_process_group(
            replace(cell, measurement=own_limit), rank, local_rank, init_method
        ) as world:
            rates: dict[str, Any] = calibrate(world)
            if rank == 0:
                write_atomically(Path(answer), json.dumps(rates))
    except Exception as error:  # cells run without these rates
        print(f"Calibration of rank {rank} failed: {error}", file=sys.stderr)
        exit_now(1)
