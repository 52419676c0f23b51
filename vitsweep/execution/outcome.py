"""From how the ranks ended to the record of their run."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vitsweep.execution.rank_processes import RankEnd
from vitsweep.execution.run_request import RunRequest
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.flatten import flatten

LOST_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting")
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Verdict:
    """What became of a run that was not measured.

    Attributes:
        status: of the record.
        reason: one sentence.
        rank: that failed first, where known.
        peak: its peak memory, where known.
    """

    status: Status
    reason: str
    rank: int | None = None
    peak: dict[str, Any] = field(default_factory=dict)


def publish(request: RunRequest, cell: CellSpec, verdict: Verdict | None) -> RunRecord:
    """Write the record of a run: rank 0's own, or that of a run that ended otherwise.

    A run that has a record keeps it: a process that outlived the death of its node, or of its job,
    finds that others have recorded what became of it and changes nothing.

    Args:
        request: of the run.
        cell: its cell.
        verdict: None where all ranks ended well.

    Returns:
        The record that stands.

    Raises:
        OSError: the record cannot be written (a full disk).
    """
    if verdict is None:
        try:
            record = RunRecord.from_json((request.folder / "record.json").read_text())
        except (OSError, ValueError) as error:
            verdict = Verdict(Status.failed, f"Rank 0 ended without a record ({error}).", 0)
    if verdict is not None:
        record = ended_otherwise(request, verdict, flatten(cell), cell.resources.device)
    return Store(request.sweep_folder).publish(record)


def ended_otherwise(
    request: RunRequest, verdict: Verdict, spec: dict[str, Any], device_type: str
) -> RunRecord:
    """Return the record of a run that was not measured."""
    return RunRecord(
        run_id=request.run_id,
        sweep=request.sweep_folder.name,
        cell_id=request.cell_id,
        block=request.block,
        position=request.position,
        attempt=request.attempt,
        status=verdict.status,
        reason=verdict.reason,
        failed_rank=verdict.rank,
        spec=spec,
        metrics=verdict.peak,
        environment={**request.environment, "device_type": device_type},
    )


def judge(ends: Sequence[RankEnd], in_time: bool, timeout_min: float) -> Verdict | None:
    """Say what became of a run, from how its ranks ended; None if all ended well."""
    if not in_time:
        reason = f"The run took longer than `measurement.timeout_min={timeout_min:g}`."
        return Verdict(Status.timed_out, reason)
    if all(end.exit_code == 0 for end in ends):
        return None
    failures = [end.failure for end in ends if end.failure]
    silent = [end for end in ends if end.exit_code and not end.failure]
    lost = [end for end in ends if end.lost]
    own = [f for f in failures if not any(peer in f["reason"] for peer in LOST_PEER)]
    if own or (failures and not silent and not lost):
        first = min(own or failures, key=lambda failure: failure["time"])
        return Verdict(
            Status(first["status"]), first["reason"], first["rank"], first.get("peak") or {}
        )
    if lost:
        return Verdict(Status.killed, lost[0].lost, lost[0].rank)
    if silent:
        return _of_exit_code(silent[0].rank, silent[0].exit_code or 0)
    return Verdict(Status.failed, "A rank did not end.", None)


def _of_exit_code(rank: int, code: int) -> Verdict:
    if code >= 0:
        reason = f"Rank {rank} left with exit code {code} without a word."
        return Verdict(Status.failed, reason, rank)
    name = signal.Signals(-code).name
    hint = " (the kernel does so when memory runs out)" if -code == signal.SIGKILL else ""
    status = Status.killed if -code in FROM_OUTSIDE else Status.failed
    return Verdict(status, f"Rank {rank} was ended by {name}{hint}.", rank)


def drop_empty_logs(request: RunRequest) -> None:
    """Remove what a run that went well leaves beside its record."""
    (request.folder / "record.json").unlink(missing_ok=True)
    for log in request.folder.glob("rank*.log"):
        if not log.stat().st_size:
            log.unlink()
    if request.folder.exists() and not any(request.folder.iterdir()):
        request.folder.rmdir()
