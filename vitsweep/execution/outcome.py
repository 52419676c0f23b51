"""From how the ranks of a run ended to its record."""

import errno
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vitsweep.execution.rank_processes import EXIT_DISK_FULL, RankEnd
from vitsweep.execution.run_request import RunRequest
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec, flatten

LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting")
"""Texts of errors that a rank meets because another rank has died."""
RECORD_DRAFT = "draft.json"
"""Where rank 0 leaves the record of its run, in the folder of the attempt."""
EXTERNAL_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)


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
    if failure is None:
        try:
            record = RunRecord.from_json(
                (request.folder / RECORD_DRAFT).read_text(encoding="utf-8")
            )
        except (OSError, ValueError) as error:
            failure = RunFailure(Status.failed, f"Rank 0 ended without a record ({error}).", 0)
    if failure is not None:
        record = not_measured_record(request, failure, flatten(cell), cell.resources.device)
    return Store(request.sweep_folder).publish(record)


def not_measured_record(
    request: RunRequest, failure: RunFailure, spec: dict[str, Any], device_type: str
) -> RunRecord:
    """Return the record of a run that was not measured."""
    return RunRecord(
        run_id=request.run_id,
        sweep=request.sweep_folder.name,
        cell_id=request.cell_id,
        block=request.block,
        position=request.position,
        attempt=request.attempt,
        status=failure.status,
        reason=failure.reason,
        failed_rank=failure.rank,
        spec=spec,
        metrics=failure.peak,
        environment={**request.environment, "device_type": device_type},
    )


def failure_of(ends: Sequence[RankEnd], in_time: bool, timeout_min: float) -> RunFailure | None:
    """Return why a run was not measured, from how its ranks ended; None if all ended with 0.

    The first rank that failed by itself gives the reason: errors about a lost peer follow from the
    death of another rank.
    """
    if not in_time:
        reason = f"The run took longer than `measurement.timeout_min={timeout_min:g}`."
        for end in ends:
            if end.lost:  # the others wait for it
                return RunFailure(Status.timed_out, f"{reason} {end.lost}", end.rank)
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
        end = min(silent, key=lambda end: end.exit_code != EXIT_DISK_FULL)
        return _failure_of_exit_code(end.rank, end.exit_code or 0)
    return RunFailure(Status.failed, "A rank did not end.")


def _failure_of_exit_code(rank: int, code: int) -> RunFailure:
    if code == EXIT_DISK_FULL:
        reason = f"Rank {rank} could not write its files: {os.strerror(errno.ENOSPC)}."
        return RunFailure(Status.killed, reason, rank)
    if code >= 0:
        reason = f"Rank {rank} left with exit code {code} and no error message."
        return RunFailure(Status.failed, reason, rank)
    name = signal.Signals(-code).name
    hint = " (the kernel does so when memory runs out)" if -code == signal.SIGKILL else ""
    status = Status.killed if -code in EXTERNAL_SIGNALS else Status.failed
    return RunFailure(status, f"Rank {rank} was ended by {name}{hint}.", rank)


def remove_working_files(request: RunRequest) -> None:
    """Remove rank 0's draft of the record and empty logs after a run that was measured."""
    (request.folder / RECORD_DRAFT).unlink(missing_ok=True)
    for log in request.folder.glob("rank*.log"):
        if not log.stat().st_size:
            log.unlink()
    if request.folder.exists() and not any(request.folder.iterdir()):
        request.folder.rmdir()
