"""The failure file of a rank: what exception it met, for the supervisor to read."""

import json
import resource
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError, disk_full_error
from vitsweep.files import write_atomically
from vitsweep.results.record import Status

OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",  # workspace of a matrix product
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    # NCCL's own buffers (its src/include/alloc.h); "Cuda failure 2 'out of memory'" is found above.
    "Failed to malloc",
    "Failed to CUDA malloc",
    "Failed to CUDA calloc",
    "Failed to CUDA host alloc",
)
OUT_OF_MEMORY_UNDER_LIMIT = (
    "could not create a primitive",  # oneDNN has no memory for its scratchpad
    "Resource temporarily unavailable",  # no memory for the stack of a thread
)
"""Texts of errors that mean a failed allocation; the second only where a memory limit is set."""


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Write `failure-<rank>.json`: status, reason, time, peak memory and traceback."""
    status, reason = classify(error)
    failure = {
        "rank": rank,
        "status": str(status),
        "reason": reason,
        "time": time.time(),
        "peak": _peak_memory(),
        "traceback": "".join(traceback.format_exception(error)),
    }
    with suppress(OSError):  # a full disk: then only the exit code tells
        traceback.print_exception(error)
        write_atomically(_failure_file(folder, rank), json.dumps(failure))


def read_failure(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return what `write_failure` wrote for a rank; None if there is nothing whole."""
    try:
        failure: dict[str, Any] = json.loads(
            _failure_file(folder, rank).read_text(encoding="utf-8")
        )
    except (OSError, ValueError):
        return None
    return failure


def killed_for_memory(rank: int) -> dict[str, Any]:
    """Return what a rank would have written that the kernel killed because memory ran out."""
    reason = (
        f"The kernel killed rank {rank} because the memory of its control group ran out "
        "(`oom_kill`): request more memory, or fewer ranks per node."
    )
    return {
        "rank": rank,
        "status": str(Status.out_of_memory),
        "reason": reason,
        "time": time.time(),
        "peak": {},
    }


def _failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"


def classify(error: BaseException) -> tuple[Status, str]:
    """Return the status that an exception means for its run, and one sentence about it."""
    import torch

    from vitsweep.cell import DivergedError
    from vitsweep.equivalence import WrongResultError

    if full := disk_full_error(error):
        return Status.killed, f"The run could not write its files: {full.strerror}."
    text = str(error).strip() or type(error).__name__
    first_line = _essence(text)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or _is_allocation_failure(text):
        return Status.out_of_memory, first_line
    if isinstance(error, DivergedError):
        return Status.diverged, text
    if isinstance(error, WrongResultError):
        return Status.wrong, text
    if isinstance(error, VitsweepError):
        return Status.failed, text
    return Status.failed, f"{type(error).__name__}: {first_line}"


def _essence(text: str) -> str:
    """Return the first line of a message, with its end where the sentence goes on in the next.

    Of NCCL's messages the last line as well, which says what happened.
    """
    first, *rest = text.splitlines()
    while rest and first[-1:] not in ".:!?" and rest[0][:1].islower():  # DDP's break lines anywhere
        first = f"{first.rstrip()} {rest.pop(0).strip()}"
    return (f"{first} {rest[-1]}" if rest and "NCCL" in first else first)[:500]


def _is_allocation_failure(text: str) -> bool:
    limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    return any(part in text for part in OUT_OF_MEMORY + OUT_OF_MEMORY_UNDER_LIMIT * limited)


def _peak_memory() -> dict[str, float | None]:
    import torch

    from vitsweep.measure.memory import peak_memory

    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    try:
        return peak_memory(torch.device("cuda" if on_gpu else "cpu"))
    except Exception:  # only a column of a failed run
        return {}
