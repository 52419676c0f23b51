"""The supervisor beside the ranks: starts them, sees every death, and writes how the run ended."""

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store, append_line
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.flatten import flatten
from vitsweep.sweep.request import RunRequest
from vitsweep.sweep.worker import rank_main

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.device_mesh",
    "torch.profiler",
    "torch._dynamo",
    "vitsweep.cell",
    "vitsweep.sweep.worker",
    "scipy.stats",
)
"""Imported once by the fork server, which runs no tensor operation: a child forked after one hangs."""
GRACE_SECONDS = 2.0
"""After the first rank has failed, the others get this long to fail by themselves and say why."""
PROFILER_NOISE = "USDT:"
"""The profiler notes its start and stop on stderr and cannot be told not to."""
LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting")

Context = ForkServerContext | SpawnContext


def fork_server() -> ForkServerContext:
    """Start (or reach) the process that has imported torch; every run is forked from it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def context_for(cell: CellSpec) -> Context:
    """Compiled cells start from a fresh interpreter: compilers start threads before the fork."""
    if cell.compilation.needs_spawn:
        return multiprocessing.get_context("spawn")
    return fork_server()


@contextmanager
def rendezvous() -> Iterator[str]:
    """Give the ranks of one run on this machine a place of their own to meet: no port to clash."""
    folder = tempfile.mkdtemp(prefix="vitsweep-")
    try:
        yield f"file://{folder}/rendezvous"
    finally:
        for path in Path(folder).glob("*"):
            path.unlink(missing_ok=True)
        os.rmdir(folder)


def supervise(request: RunRequest, cell: CellSpec) -> RunRecord:
    """Run all ranks of a cell on this machine and return the record, which is on disk by then.

    Raises:
        OSError: the record cannot be written (a full disk).
        KeyboardInterrupt: the user stops; the ranks are gone by then and nothing is recorded.
    """
    context, store = context_for(cell), Store(request.sweep_folder)
    ranks = cell.resources.world_size
    _note(request, "start", ranks=ranks)
    processes = [
        context.Process(target=rank_main, args=(request, rank, rank))  # may start loader workers
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        in_time = _wait(processes, cell.measurement.timeout_min * 60)
    finally:
        _kill(processes)
    codes = [process.exitcode for process in processes]
    _note(request, "end", exit_codes=codes, in_time=in_time)
    return _outcome(request, cell, store, codes, in_time)


def _wait(processes: list[BaseProcess], seconds: float) -> bool:
    """Wait until all ranks have ended, or one has failed and the grace is over, or time is up."""
    deadline, failed_at = time.monotonic() + seconds, None
    while alive := [p for p in processes if p.is_alive()]:
        now = time.monotonic()
        if now > deadline:
            return False
        if failed_at is None and any(p.exitcode for p in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE_SECONDS:
            return True
        wait([p.sentinel for p in alive], timeout=min(0.2, max(0.01, deadline - now)))
    return True


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.pid is not None and process.is_alive():
            process.kill()
    for process in processes:
        if process.pid is not None:
            process.join()


def _outcome(
    request: RunRequest, cell: CellSpec, store: Store, codes: list[int | None], in_time: bool
) -> RunRecord:
    saved = store.cell(request.cell_id) / "runs" / f"{request.run_id}.json"
    if saved.exists() and all(code == 0 for code in codes):
        _drop_empty_logs(request.folder)
        return RunRecord.from_json(saved.read_text())
    status, reason, rank, peak = _why(request, codes, in_time, cell)
    record = RunRecord(
        run_id=request.run_id,
        sweep=request.sweep_folder.name,
        cell_id=request.cell_id,
        block=request.block,
        position=request.position,
        attempt=request.attempt,
        status=status,
        reason=reason,
        failed_rank=rank,
        spec=flatten(cell),
        metrics=peak,
        environment={**request.environment, "device_type": cell.resources.device},
    )
    store.save_run(record)
    return record


def _why(
    request: RunRequest, codes: list[int | None], in_time: bool, cell: CellSpec
) -> tuple[Status, str, int | None, dict[str, Any]]:
    """Return status, reason, first rank at fault, and its peak memory."""
    if not in_time:
        limit = cell.measurement.timeout_min
        return (
            Status.timed_out,
            f"The run took longer than `measurement.timeout_min={limit:g}`.",
            None,
            {},
        )
    failures = _failures(request.folder)
    silent = [r for r, code in enumerate(codes) if code and r not in {f["rank"] for f in failures}]
    own = [f for f in failures if not any(lost in f["reason"] for lost in LOST_PEER)]
    own += [] if silent else failures
    if own:
        first = min(own, key=lambda failure: failure["time"])
        return Status(first["status"]), first["reason"], first["rank"], first["peak"]
    if silent:
        return _of_exit_code(silent[0], codes[silent[0]] or 0)
    return Status.failed, "Rank 0 ended without a record.", 0, {}


def _of_exit_code(rank: int, code: int) -> tuple[Status, str, int, dict[str, Any]]:
    if code >= 0:
        return Status.failed, f"Rank {rank} left with exit code {code} without a word.", rank, {}
    name = signal.Signals(-code).name
    hint = " (the kernel does so when memory runs out)" if -code == signal.SIGKILL else ""
    status = (
        Status.killed if -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP) else Status.failed
    )
    return status, f"Rank {rank} was ended by {name}{hint}.", rank, {}


def _failures(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("failure-*.json"))]


def _drop_empty_logs(folder: Path) -> None:
    for log in folder.glob("rank*.log"):
        lines = log.read_text(errors="replace").splitlines()
        if all(line.startswith(PROFILER_NOISE) for line in lines):
            log.unlink()
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


def _note(request: RunRequest, event: str, **facts: Any) -> None:
    entry = {
        "event": event,
        "run_id": request.run_id,
        "attempt": request.attempt,
        "time": time.time(),
    }
    append_line(request.folder.parent.parent / "attempts.jsonl", entry | facts)
