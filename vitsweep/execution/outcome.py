"""How the ranks of a run ended: what each left behind, and from that the record of the run."""

import json
import os
import re
import resource
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitsweep.data.damaged_images import list_damaged
from vitsweep.errors import VitsweepError, storage_error
from vitsweep.execution.run_request import RunRequest
from vitsweep.files import open_safely, read_text, remove, write_atomically
from vitsweep.foreign import foreign
from vitsweep.results.record import RunRecord, Status, recorded_samples
from vitsweep.results.store import Store
from vitsweep.results.user_metrics import with_user_metrics
from vitsweep.spec.cell_spec import CellSpec, flatten

LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting")
"""Texts of errors that a rank meets because another rank has died."""
RECORD_DRAFT = "draft.json"
"""Where rank 0 leaves the record of its run, in the folder of the attempt."""
NO_INSTRUMENTS = "instruments_reason"
"""In the environment of a record: why a run that was timed lacks what instruments measure after that."""
EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
EXIT_SAVED = os.EX_TEMPFAIL
"""Exit code of a rank that was requested to stop and has saved a checkpoint to resume from."""
EXIT_STORAGE = os.EX_IOERR
"""Exit code of a rank that could not write: its failure file cannot be written either."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended.

    Attributes:
        rank: global rank.
        exit_code: as in `subprocess` (negative for a signal); None where it is unknown.
        failure: content of the rank's failure file, or None.
        lost: why the exit code is unknown (the node or the fork server is gone), or "".
    """

    rank: int
    exit_code: int | None
    failure: dict[str, Any] | None = None
    lost: str = ""


@dataclass(frozen=True)
class RunFailure:
    """Why a run was not measured.

    Attributes:
        status: status of its record; not `measured`.
        reason: one sentence.
        rank: global rank that failed first, where known.
        peak: peak memory columns of that rank, where known.
    """

    status: Status
    reason: str
    rank: int | None = None
    peak: dict[str, Any] = field(default_factory=dict)


def publish(request: RunRequest, cell: CellSpec, failure: RunFailure | None) -> RunRecord:
    """Write the record of a run: the one rank 0 left, or one that says why there is none.

    A rank that dies, hangs or lacks memory after the timed steps, under the instruments, takes the
    columns of these alone.

    The first record of a run is final: a process that outlived its node or job and publishes late
    changes nothing.

    Args:
        request: the run.
        cell: its cell.
        failure: why it was not measured; None where all ranks ended with exit code 0.

    Returns:
        The record on disk.

    Raises:
        OSError: the record cannot be written (a full disk).
    """
    store = Store(request.sweep_folder)
    list_damaged(store.root, request.folder)
    try:
        record = RunRecord.from_json(read_text(request.folder / RECORD_DRAFT))
        if (record.cell_id, record.run_id) != (request.cell_id, request.run_id):
            raise ValueError("it is of another run")
    except (OSError, ValueError) as error:
        missing = RunFailure(Status.failed, f"Rank 0 ended without a record ({error}).", 0)
        return _publish_failure(request, cell, failure or missing)
    if failure is not None:
        if NO_INSTRUMENTS not in record.environment:
            return _publish_failure(request, cell, failure)
        reason = {NO_INSTRUMENTS: f"After the timed steps: {failure.reason}"}
        record = replace(record, environment=record.environment | reason)
        # rank 0 computes them of a whole record only
        record = with_user_metrics(record, request.metrics)
        record = replace(record, samples=recorded_samples(record.samples))
    return store.publish(record)


def _publish_failure(request: RunRequest, cell: CellSpec, failure: RunFailure) -> RunRecord:
    record = request.record(
        status=failure.status,
        reason=failure.reason,
        failed_rank=failure.rank,
        spec=flatten(cell),
        metrics=failure.peak,
        environment={**request.environment, "device_type": cell.resources.device},
    )
    return Store(request.sweep_folder).publish(record)


def failure_of(ends: Sequence[RankEnd], in_time: bool, timeout_min: float) -> RunFailure | None:
    """Return why a run was not measured, from how its ranks ended; None if all ended with 0.

    The first rank that failed by itself gives the reason: errors about a lost peer follow from the
    death of another rank.
    """
    if not in_time:
        reason = f"The run took longer than `measurement.timeout_min={timeout_min:g}`."
        return RunFailure(Status.timed_out, reason)
    if all(end.exit_code == 0 for end in ends):
        return None
    failures = [end.failure for end in ends if end.failure]
    silent = [end for end in ends if end.exit_code and not end.failure]
    lost = [end for end in ends if end.lost]
    left = [end for end in ends if end.exit_code == 0 and failures and not silent]
    own = [f for f in failures if not any(peer in f["reason"] for peer in LOST_PEER)]
    if own or (failures and not silent and not lost and not left):
        first = min(own or failures, key=lambda failure: failure["time"])
        return RunFailure(
            Status(first["status"]), first["reason"], first["rank"], first.get("peak") or {}
        )
    if lost:
        return RunFailure(Status.killed, lost[0].lost, lost[0].rank)
    if left:
        reason = f"Rank {left[0].rank} exited with code 0 before the run was done."
        return RunFailure(Status.failed, reason, left[0].rank)
    if silent:
        end = min(silent, key=lambda end: end.exit_code != EXIT_STORAGE)
        return _failure_of_exit_code(end.rank, end.exit_code or 0)
    return RunFailure(Status.failed, "A rank did not end.")


def _failure_of_exit_code(rank: int, code: int) -> RunFailure:
    if code == EXIT_STORAGE:
        reason = f"Rank {rank} could not read or write its files: the disk is full or fails."
        return RunFailure(Status.killed, reason, rank)
    if code >= 0:
        reason = (
            f"Rank {rank} left with exit code {code} and no error message: see `rank{rank}.log` under "
            "`attempts/` of the cell."
        )
        return RunFailure(Status.failed, reason, rank)
    name = signal.Signals(-code).name
    hint = " (the kernel does so when memory runs out)" if -code == signal.SIGKILL else ""
    status = Status.killed if -code in EXTERNAL_SIGNALS else Status.failed
    return RunFailure(status, f"Rank {rank} was ended by {name}{hint}.", rank)


LOG_PART_BYTES = 4 * 2**20
"""Of a rank's log its first and its last so many are kept."""


def cut_logs(folder: Path) -> None:
    """Leave out the midst of long logs, with a line that says so; what cannot be cut stays.

    Args:
        folder: of an attempt whose ranks have ended.
    """
    for log in folder.glob("rank*.log"):
        with suppress(OSError), open(open_safely(log, os.O_RDWR), "r+b") as file:
            begin = os.fstat(file.fileno()).st_size - LOG_PART_BYTES
            if begin > LOG_PART_BYTES:
                file.seek(begin)
                end = file.read()
                file.seek(LOG_PART_BYTES)
                left_out = begin - LOG_PART_BYTES
                file.write(
                    f"\n[{left_out} bytes were left out here when the run had ended]\n".encode()
                )
                file.write(end)
                file.truncate()


def remove_working_files(request: RunRequest) -> None:
    """Remove rank 0's draft of the record and empty logs after a run that was measured."""
    remove(request.folder / RECORD_DRAFT)
    for log in request.folder.glob("rank*.log"):
        if not log.stat().st_size:
            log.unlink()
    if request.folder.exists() and not any(request.folder.iterdir()):
        request.folder.rmdir()


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


# The failure file of a rank: what exception it met, for the supervisor to read.


def write_failure(folder: Path, rank: int, error: BaseException) -> None:
    """Write `failure-<rank>.json`: status, reason, time, peak memory and traceback."""
    failure = _failure(rank, *classify(error), _peak_memory())
    failure["traceback"] = "".join(traceback.format_exception(error))
    with suppress(OSError):  # a full disk: then only the exit code tells
        traceback.print_exception(error)
        write_atomically(folder / f"failure-{rank}.json", json.dumps(failure))


def read_failure(folder: Path, rank: int) -> dict[str, Any] | None:
    """Return what `write_failure` wrote for a rank; None if there is nothing whole."""
    try:
        failure: dict[str, Any] = foreign(folder / f"failure-{rank}.json")
    except (OSError, ValueError):
        return None
    return failure


def killed_for_memory(rank: int) -> dict[str, Any]:
    """Return what a rank would have written that the kernel killed because memory ran out."""
    reason = (
        f"The kernel killed rank {rank} because the memory of its control group ran out "
        "(`oom_kill`): request more memory, or fewer ranks per node."
    )
    return _failure(rank, Status.out_of_memory, reason, {})


def _failure(rank: int, status: Status, reason: str, peak: dict[str, Any]) -> dict[str, Any]:
    failure = {"rank": rank, "status": str(status), "reason": reason}
    return failure | {"time": time.time(), "peak": peak}


def classify(error: BaseException) -> tuple[Status, str]:
    """Return the status that an exception means for its run, and one sentence about it."""
    import torch

    from vitsweep.cell import DivergedError, StoppedError
    from vitsweep.proof.faults import WrongResultError

    if failed := storage_error(error):
        name = f" (`{failed.filename}`)" if failed.filename else ""
        return Status.killed, f"The run could not read or write its files: {failed.strerror}{name}."
    name, text, where = _own_words(error)
    first_line = _essence(text) + where
    limited = resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY
    lacking = any(part in text for part in OUT_OF_MEMORY + OUT_OF_MEMORY_UNDER_LIMIT * limited)
    if lacking or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return Status.out_of_memory, first_line
    if isinstance(error, DivergedError):
        return Status.diverged, text
    if isinstance(error, WrongResultError):
        return Status.wrong, text
    if isinstance(error, StoppedError):
        return Status.preempted, text
    if isinstance(error, VitsweepError):
        return Status.failed, text
    return Status.failed, f"{name}: {first_line}"


FRAMES_IN_WORKER = re.compile(
    r'.*Original Traceback \(most recent call last\):\n.*^  File "[^\n]*\n(  [^\n]*\n)*',
    re.S | re.M,
)
"""What torch writes before the last lines of the traceback of a loader's worker."""


def _own_words(error: BaseException) -> tuple[str, str, str]:
    """Return the type of an exception, its message, and its last note (which item was read), or "".

    Of one that a loader's worker raised, those of the worker: torch's own message names the worker alone.
    """
    name, text = type(error).__name__, str(error).strip()
    notes = getattr(error, "__notes__", [])
    if found := FRAMES_IN_WORKER.match(text):
        raised, *notes = text[found.end() :].splitlines()
        name, _, text = raised.partition(": ")
        if isinstance(error, VitsweepError):
            text = "\n".join([text, *notes])
    return name, text or name, "".join(f" {note}" for note in notes[-1:])


def _essence(text: str) -> str:
    """Return the first line of a message, with its end where the sentence goes on in the next.

    Of NCCL's messages the last line as well, which says what happened.
    """
    first, *rest = text.splitlines()
    while rest and first[-1:] not in ".:!?" and rest[0][:1].islower():  # DDP's break lines anywhere
        first = f"{first.rstrip()} {rest.pop(0).strip()}"
    return (f"{first} {rest[-1]}" if rest and "NCCL" in first else first)[:500]


def _peak_memory() -> dict[str, float | None]:
    import torch

    from vitsweep.measure.memory import peak_memory

    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    try:
        return peak_memory(torch.device("cuda" if on_gpu else "cpu"))
    except Exception:  # only a column of a failed run
        return {}
