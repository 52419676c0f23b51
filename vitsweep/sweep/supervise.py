"""The supervisor beside the ranks: starts them, sees every death, and writes how the run ended."""

import os
import socket
import time
from typing import Any

from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import append_line
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.sweep.outcome import drop_empty_logs, judge, publish
from vitsweep.sweep.ranks import LocalRanks, Ranks, Start, context_for, wait_for_all
from vitsweep.sweep.request import RunRequest
from vitsweep.sweep.worker import rank_main

GRACE_SECONDS = 2.0
"""After the first rank has failed, the others get this long to fail by themselves and say why."""


def start_here(request: RunRequest, cell: CellSpec) -> Ranks:
    """Start all ranks of a cell on this machine."""
    everyone = range(cell.resources.world_size)
    return LocalRanks(context_for(cell), rank_main, (request,), everyone, request.folder)


def supervise(request: RunRequest, cell: CellSpec, start: Start = start_here) -> RunRecord:
    """Run all ranks of a cell and return the record, which is on disk by then.

    Args:
        request: the run.
        cell: as frozen.
        start: starts the ranks, here or on the nodes of an allocation.

    Raises:
        OSError: the record cannot be written (a full disk).
        KeyboardInterrupt: the user stops; the ranks are gone by then and nothing is recorded.
    """
    note(request, "start", ranks=cell.resources.world_size)
    ranks = start(request, cell)
    in_time = False
    try:
        in_time = wait_for_all(ranks, cell.measurement.timeout_min * 60, GRACE_SECONDS)
    finally:
        ends = ranks.ends()  # before the rest is ended here: that is nobody's fault
        ranks.kill()
        codes = [end.exit_code for end in ranks.ends()]
        note(request, "end", exit_codes=codes, in_time=in_time)
    record = publish(request, cell, judge(ends, in_time, cell.measurement.timeout_min))
    if record.status == Status.measured:
        drop_empty_logs(request)
    return record


def note(request: RunRequest, event: str, **facts: Any) -> None:
    """Write a line into the life of the cell's attempts."""
    entry = {
        "event": event,
        "run_id": request.run_id,
        "attempt": request.attempt,
        "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
        "job": request.environment.get("slurm_job_id"),
        "time": time.time(),
    }
    append_line(request.folder.parent.parent / "attempts.jsonl", entry | facts)
