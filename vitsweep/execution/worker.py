"""One rank of one run: a fresh process that reads a frozen cell, runs it, and says how it ended."""

import contextlib
import ctypes
import json
import multiprocessing
import os
import resource
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitsweep.errors import VitsweepError
from vitsweep.execution.frozen_cell import read_cell
from vitsweep.execution.rank_processes import SAVED, STOP_SIGNAL
from vitsweep.execution.run_request import RunRequest
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store, write_atomically
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.flatten import flatten
from vitsweep.spec.resources import Resources
from vitsweep.training.saved import FOLDER, Interrupted
from vitsweep.world import World

if TYPE_CHECKING:
    from vitsweep.training.checkpoint_manager import CheckpointManager

MIB, GIB = 2**20, 2**30
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
"""Parameters of mallopt(3)."""
_TOLD_TO_STOP = threading.Event()


def rank_main(request: RunRequest, rank: int, local_rank: int) -> None:
    """Run one rank to its end; the process exits with 0 only if it has done all its work.

    Rank 0 leaves the record of a measured run in the run's folder; the supervisor publishes it when
    all ranks have ended well. Any rank that fails leaves `failure-<rank>.json` for the supervisor.
    """
    _die_with_launcher()
    signal.signal(STOP_SIGNAL, lambda *_: _TOLD_TO_STOP.set())
    multiprocessing.current_process().daemon = False  # a daemon could not start loader workers
    request.folder.mkdir(parents=True, exist_ok=True)
    _log_to(request.folder / f"rank{rank}.log")
    try:
        cell = read_cell(Store(request.sweep_folder), request.cell_id)
        with joined_world(cell, rank, local_rank, request.init_method) as world:
            record = _record(request, cell, world, _checkpoint_manager(request, world))
            if record is not None:
                write_atomically(request.folder / "record.json", record.to_json())
    except Interrupted as saved:
        print(saved)
        _exit_now(SAVED)
    except BaseException as error:  # whatever it is, the supervisor must know why
        _leave_failure(request, rank, error)
        _exit_now(1)
    _exit_now(0)


def rank_here(request: RunRequest, cell: CellSpec, rank: int, local_rank: int) -> str:
    """Run one rank in this very process, which torchrun or srun started; return how it went.

    Nobody supervises here: an exception ends the process, and the launcher of the ranks sees it.
    """
    import torch.distributed as dist

    with joined_world(cell, rank, local_rank, request.init_method) as world:
        name = [f"in-place-{secrets.token_hex(4)}"]
        dist.broadcast_object_list(name)
        record = _record(replace(request, run_id=name[0], block=name[0]), cell, world, None)
        if record is not None:
            Store(request.sweep_folder).publish(record)
    return f"cell {cell.cell_id}, run {name[0]}: measured"


def _record(
    request: RunRequest, cell: CellSpec, world: World, checkpoints: "CheckpointManager | None"
) -> RunRecord | None:
    """Run the cell; return its record on rank 0, None on the others."""
    from vitsweep.cell import RunContext, run_cell
    from vitsweep.measure.clock import now

    started_at, begin = now(), time.time()
    around = RunContext(
        calibration=request.calibration,
        proved=request.proved,
        trace_folder=request.folder,
        checkpoints=checkpoints,
    )
    summary = run_cell(cell, world, around)
    if world.rank:
        return None
    times = {"started_at": started_at, "run_seconds": round(time.time() - begin, 3)}
    return RunRecord(
        run_id=request.run_id,
        sweep=request.sweep_folder.name,
        cell_id=request.cell_id,
        block=request.block,
        position=request.position,
        attempt=request.attempt,
        status=Status.measured,
        spec=flatten(cell),
        metrics=summary.metrics,
        validity=summary.validity,
        environment=summary.environment | dict(request.environment) | times,
        samples=summary.samples,
    )


def _checkpoint_manager(request: RunRequest, world: World) -> "CheckpointManager":
    from vitsweep.training.checkpoint_manager import CheckpointManager
    from vitsweep.training.stop_consensus import StopConsensus

    earlier = tuple(folder / FOLDER for folder in request.earlier)
    return CheckpointManager(
        request.folder / FOLDER, earlier, StopConsensus(_TOLD_TO_STOP, world.device)
    )


@contextlib.contextmanager
def joined_world(cell: CellSpec, rank: int, local_rank: int, init_method: str) -> Iterator[World]:
    """Join the process group and its mesh; leave it in a way that aborts nobody."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from vitsweep.spec.mesh_shape import AXES

    asked = cell.resources
    device = _device(asked, local_rank)
    torch.set_num_threads(asked.threads_per_rank)
    dist.init_process_group(
        "nccl" if asked.device == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=asked.world_size,
        timeout=timedelta(minutes=cell.measurement.timeout_min),
        device_id=device if asked.device == "cuda" else None,
    )
    mesh = init_device_mesh(asked.device, cell.mesh.degrees(), mesh_dim_names=AXES)
    limit_memory(asked)
    yield World(
        rank=rank,
        local_rank=local_rank,
        size=asked.world_size,
        device=device,
        shape=cell.mesh,
        mesh=mesh,
    )
    # gloo aborts now and then where one rank tears down while another still uses the connection
    dist.barrier()
    dist.destroy_process_group()


def _device(asked: Resources, local_rank: int) -> Any:
    import torch

    if asked.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise VitsweepError(
            "The cell was frozen for `resources.device=cuda`, but this node shows no usable GPU."
        )
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def limit_memory(asked: Resources) -> None:
    """Let allocations fail beyond `resources.memory_gib_per_rank` of what is in use by now."""
    if asked.memory_gib_per_rank is None or asked.device != "cpu":
        return
    _return_freed_memory()
    in_use = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limit = in_use + int(asked.memory_gib_per_rank * GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _return_freed_memory() -> None:
    """Let glibc give large blocks back when they are freed, whichever thread they served.

    Else a budget is spent on holes: gloo's threads would each keep an arena of their own, and a
    freed gradient bucket would stay between tensors that live.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, MIB)


def _leave_failure(request: RunRequest, rank: int, error: BaseException) -> None:
    status, reason = classify(error)
    failure = {
        "rank": rank,
        "status": str(status),
        "reason": reason,
        "time": time.time(),
        "peak": _peak(),
        "traceback": "".join(traceback.format_exception(error)),
    }
    traceback.print_exception(error)
    with contextlib.suppress(OSError):  # a full disk: the exit code has to do
        write_atomically(request.folder / f"failure-{rank}.json", json.dumps(failure))


def classify(error: BaseException) -> tuple[Status, str]:
    """Return the status that an exception means, and one sentence about it."""
    import torch

    from vitsweep.cell import DivergedError
    from vitsweep.equivalence import WrongResultError

    text = str(error).strip() or type(error).__name__
    first_line = text.splitlines()[0][:500]
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _is_allocation_failure(text):
        return Status.out_of_memory, first_line
    if isinstance(error, DivergedError):
        return Status.diverged, text
    if isinstance(error, WrongResultError):
        return Status.wrong, text
    if isinstance(error, VitsweepError):
        return Status.failed, text
    return Status.failed, f"{type(error).__name__}: {first_line}"


def _is_allocation_failure(text: str) -> bool:
    needles = (
        "can't allocate memory",
        "not enough memory",
        "out of memory",
        "Cannot allocate memory",
    )
    under_budget = (
        "could not create a primitive",  # oneDNN has no memory for its scratchpad
        "Resource temporarily unavailable",  # no memory for the stack of a thread
    )
    limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    return any(needle in text for needle in needles + under_budget * limited)


def _peak() -> dict[str, float | None]:
    import torch

    from vitsweep.measure.memory_peak import peak_memory

    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    try:
        return peak_memory(torch.device("cuda" if on_gpu else "cpu"))
    except Exception:  # only a column of a failed run
        return {}


def _log_to(path: Path) -> None:
    """Send everything this rank prints, C++ libraries included, to its own file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _die_with_launcher() -> None:
    """A rank must not outlive its launcher; Ctrl-C is the launcher's to handle.

    The parent of a forked rank is the fork server, which lives as long as any rank does: the
    launcher itself is watched.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        threading.Thread(target=_end_after, args=(launcher,), daemon=True).start()


def _end_after(launcher: Any) -> None:
    launcher.join()
    os.kill(os.getpid(), signal.SIGKILL)


def _exit_now(code: int) -> None:
    """Leave without running exit handlers: they wait for threads that no longer matter."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
