"""Runs of cells, one attempt after the other, on this machine or on the nodes of a job."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Protocol

from vitsweep.errors import VitsweepError
from vitsweep.execution.attempts import (
    append_event,
    append_start,
    attempts,
    broken_off_trainings,
)
from vitsweep.execution.code_hash import MOST_FILES, CellCode, changed_files, code_of
from vitsweep.execution.outcome import (
    NO_INSTRUMENTS,
    cut_logs,
    failure_of,
    publish,
    remove_working_files,
)
from vitsweep.execution.rank_processes import (
    LocalRanks,
    Ranks,
    StartRanks,
    context_for,
    rendezvous,
    wait_for_ranks,
)
from vitsweep.execution.run_request import Run, RunRequest, earlier_folders, request_for
from vitsweep.execution.worker import rank_main
from vitsweep.extras import INSTRUMENTS
from vitsweep.files import remove
from vitsweep.results.record import SCREENING, RunRecord, Status, time_to_begin
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec, twin_settings
from vitsweep.spec.measurement import MIN_BLOCKS
from vitsweep.training.checkpoint_files import CHECKPOINT_FOLDER, read_info, whole_checkpoints

# The supervisor of a run: starts its ranks, watches how they end, and publishes the record.

GRACE_SECONDS = 2.0
"""After the first rank has failed, the others get this long to fail and report by themselves."""
RESUMABLE = (Status.killed, Status.preempted, Status.timed_out)
"""A later attempt may resume from the checkpoint of a run that ended so."""


class RunEnding(Exception):
    """A run must end before it is done; raised by `on_wait` while its ranks run.

    Attributes:
        seconds_to_save: time for a training to save a checkpoint; 0 to save none.
        is_forced: tells while it saves whether the user no longer waits for it.
        saved_step: optimizer steps in the checkpoint, set by the supervisor; None if there is none.
        record: of the run, set by the supervisor where all ranks had just finished.
    """

    def __init__(
        self, reason: str, seconds_to_save: float, is_forced: Callable[[], bool] = lambda: False
    ) -> None:
        super().__init__(reason)
        self.seconds_to_save, self.is_forced = seconds_to_save, is_forced
        self.saved_step: int | None = None
        self.record: RunRecord | None = None


def supervise(
    request: RunRequest,
    cell: CellSpec,
    start: StartRanks,
    on_wait: Callable[[], None] = lambda: None,
) -> RunRecord:
    """Run all ranks of a cell and publish the record.

    Args:
        request: the run.
        cell: as the command wants it; its `measurement` may differ from that of the frozen cell.
        start: starts the ranks, on this machine or on the nodes of an allocation.
        on_wait: called about five times a second while they run; may raise RunEnding.

    Returns:
        The record, which is on disk.

    Raises:
        OSError: the record cannot be written (a full disk).
        RunEnding: from `on_wait`. The ranks are gone then, a training has saved a checkpoint if
            there was time, and nothing is recorded unless all ranks had just finished.
    """
    request = _completed(request, cell)
    Store(request.sweep_folder).put_back(request.cell_id)
    append_start(request, cell)
    ranks = start(request, cell)
    in_time, saved_step = False, None
    try:
        in_time = wait_for_ranks(ranks, cell.measurement.timeout_min * 60, GRACE_SECONDS, on_wait)
    except RunEnding as ending:
        if cell.task.epochs and ending.seconds_to_save > 0:
            saved_step = ending.saved_step = _interrupt(ranks, request, ending)
        ranks.kill()  # the reports of ranks that have ended meanwhile are read too
        if all(end.exit_code == 0 for end in ranks.ends()):
            ending.record = publish(request, cell, None)
        raise
    finally:
        ends = ranks.ends()  # read before `kill` below ends the others
        ranks.kill()
        codes = [end.exit_code for end in ranks.ends()]
        append_event(request, "end", exit_codes=codes, in_time=in_time, saved_step=saved_step)
        cut_logs(request.folder)
    finished = set(codes) == {0}  # even where the time was over before that was known
    failure = None if finished else failure_of(ends, in_time, cell.measurement.timeout_min)
    record = publish(request, cell, failure)
    if record.status not in RESUMABLE:
        _drop_checkpoints((request.folder, *request.earlier, *request.trainings))
    if record.status == Status.measured:
        remove_working_files(request)
    return record


def _completed(request: RunRequest, cell: CellSpec) -> RunRequest:
    """Add what belongs to the command and not to the frozen cell, and what every record says."""
    store, cell_id = Store(request.sweep_folder), request.cell_id
    facts = {"started_at": time_to_begin(store.runs(cell_id)), **store.prediction(cell_id)}
    code_hash = str(request.environment.get("code_hash") or code_of(cell).hash)
    trainings: tuple[Path, ...] = ()
    if cell.task.epochs:
        trainings = broken_off_trainings(store, cell_id, code_hash)
    return replace(
        request,
        trainings=trainings,
        of_command=cell.of_command,
        environment=facts | request.environment | {"code_hash": code_hash},
    )


def _interrupt(ranks: Ranks, request: RunRequest, ending: RunEnding) -> int | None:
    """Let a training save a checkpoint; return its optimizer steps, or None if it has saved none.

    The info file alone decides. A rank may still fail while it leaves: gloo's last barrier breaks
    now and then where the other ranks have exited.
    """

    asked_at = -inf

    def ask() -> None:
        """Ask every second: a rank that is just starting ignores the first signal."""
        nonlocal asked_at
        if ending.is_forced():
            raise ending
        if time.monotonic() > asked_at + 1:
            asked_at = time.monotonic()
            ranks.interrupt()

    with suppress(RunEnding):
        ask()
        wait_for_ranks(ranks, ending.seconds_to_save, GRACE_SECONDS, ask)
    whole = whole_checkpoints(request.folder / CHECKPOINT_FOLDER)
    if not whole:
        return None
    _drop_checkpoints((*request.earlier, *request.trainings))
    return read_info(whole[0]).step


def _drop_checkpoints(attempts: Iterable[Path]) -> None:
    """Remove the checkpoints of attempts, once nothing resumes from them."""
    for attempt in attempts:
        remove(attempt / CHECKPOINT_FOLDER)


class Executor(Protocol):
    """Where the ranks of runs are started."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Columns of every record that is made here: launcher, git state, queue time."""

    @property
    def scratch(self) -> Path:
        """Folder that does not exist, on all nodes the same, for a run whose record is discarded."""

    def start(self, request: RunRequest, cell: CellSpec) -> Ranks:
        """Start all ranks of a run."""

    def rendezvous(self) -> AbstractContextManager[str]:
        """Hold an `init_method` for the ranks of one run."""

    def lacks(self, cell: CellSpec) -> str:
        """Say which nodes that a cell needs are gone; "" where all are there."""


@dataclass(frozen=True)
class LocalExecutor:
    """This machine.

    Attributes:
        store: of the sweep.
        facts: columns of every record.
    """

    store: Store
    facts: Mapping[str, Any]

    @property
    def scratch(self) -> Path:
        """A folder next to the temporary files of this machine."""
        return Path(tempfile.mkdtemp(prefix="vitsweep-warm-up-"))

    def start(self, request: RunRequest, cell: CellSpec) -> Ranks:
        """Start all ranks as processes of this machine."""
        ranks, environment = range(cell.resources.world_size), cell.runtime.rank_environment
        context, folder = context_for(cell), request.folder
        return LocalRanks(context, rank_main, (request,), ranks, folder, environment)

    rendezvous = staticmethod(rendezvous)
    """Hold a file in which the ranks meet."""

    def lacks(self, cell: CellSpec) -> str:
        """Return "": this machine is there."""
        return ""


@dataclass
class Runner:
    """Runs cells of one sweep on one executor.

    Attributes:
        store: where the records go.
        executor: starts the ranks.
        on_wait: called about five times a second while ranks run; may raise `RunEnding`.
    """

    store: Store
    executor: Executor
    on_wait: Callable[[], None] = lambda: None
    _proved: dict[str, str] = field(default_factory=dict)
    _proved_exactly: dict[str, str] = field(default_factory=dict)
    _instrumented: Counter[str] = field(default_factory=Counter)

    def request(
        self, run: Run, cell: CellSpec, attempt: int = 0, planned: CellCode | None = None
    ) -> RunRequest:
        """Return the request of an attempt, still without rendezvous.

        A training goes on with what earlier attempts have saved if the same code began them all.

        Args:
            run: the run.
            cell: its cell.
            attempt: from 1; 0 for the one after the latest.
            planned: code of the cell as the command found it; None where any code may run.

        Raises:
            VitsweepError: the code was edited since it was planned.
        """
        code = code_of(cell)
        if planned is not None and planned.hash != code.hash:
            edited = ", ".join(changed_files(planned.files, code.files)[:MOST_FILES])
            raise VitsweepError(
                f"The code was edited while the command runs ({edited}). What was measured is kept: the same "
                "command goes on with the code as it is then."
            )
        self.store.keep_code(code.hash, code.files)
        begun = [a for a in attempts(self.store, run.cell_id) if a.run.name == run.name]
        attempt = attempt or max((a.number for a in begun), default=0) + 1
        purpose = {"purpose": run.purpose} if run.purpose else {}
        same_code = all(begin.code_hash == code.hash for begin in begun)
        return request_for(
            self.store,
            run,
            attempt,
            proved=self.proof(cell, code.hash),
            proved_exactly=self._proved_exactly.get(_id_of_proof(cell), ""),
            earlier=earlier_folders(self.store, run, attempt) if same_code else (),
            environment={**self.executor.facts, **purpose, "code_hash": code.hash},
            instruments=self._instrumented[run.cell_id] < MIN_BLOCKS
            or bool(cell.task.epochs)
            or any(getattr(cell.measurement, key) for key in ("trace", *INSTRUMENTS)),
        )

    def attempt(self, request: RunRequest, cell: CellSpec) -> RunRecord:
        """Make an attempt at a run, or at a screening run, and return its record, which is on disk by then.

        Raises:
            RunEnding: from `on_wait`; nothing is recorded unless all ranks had just finished.
            OSError: the record cannot be written (a full disk).
        """
        if request.environment.get("purpose") == SCREENING:
            cell = replace(cell, measurement=cell.measurement.for_screening())
        return self._supervised(request, cell)

    def warm_up(self, request: RunRequest, cell: CellSpec) -> RunRecord:
        """Run a cell for a second and discard what it measures; a line of `attempts.jsonl` says so.

        It has a run id of its own: a late report about it must not be taken for one about the run.

        Returns:
            The record, which is not on disk any more.

        Raises:
            RunEnding: from `on_wait`.
            OSError: nothing can be written (a full disk).
        """
        cell = replace(cell, measurement=cell.measurement.for_screening())
        request = replace(request, run_id=f"{request.run_id}-warm-up", instruments=False)
        scratch = self.executor.scratch
        remove(scratch)
        discarded = Store(scratch.absolute()).create()
        try:
            frozen = Store(request.sweep_folder, {request.cell_id: request.digest})
            discarded.freeze(request.cell_id, frozen.frozen(request.cell_id))
            digest = discarded.digest(request.cell_id)
            there = replace(request, sweep_folder=discarded.root, digest=digest)
            record = self._supervised(there, cell)
        finally:
            remove(scratch)
        append_event(request, "warm_up", status=str(record.status))
        return record

    def _supervised(self, request: RunRequest, cell: CellSpec) -> RunRecord:
        with self.executor.rendezvous() as init_method:
            request = replace(request, init_method=init_method)
            record = supervise(request, cell, self.executor.start, self.on_wait)
        if record.status == Status.measured:
            has_all = NO_INSTRUMENTS not in record.environment and not record.is_screening
            self._instrumented[request.cell_id] += has_all
            proved = self._proved[request.cell_id] = str(record.validity.get("proved") or "")
            if proved:
                self._proved_exactly[_id_of_proof(cell)] = proved
        return record

    def proof(self, cell: CellSpec, code_hash: str) -> str:
        """Return how the equality of a cell was proved in an earlier run of the same code, or ""."""
        if (cell_id := cell.cell_id) not in self._proved:
            found = [""]
            with suppress(VitsweepError):  # of a later version than this job runs
                found += [
                    str(run.validity["proved"])
                    for run in self.store.runs(cell_id)
                    if run.status == Status.measured
                    and run.validity.get("proved")
                    and run.environment.get("code_hash") == code_hash
                    and twin_settings(run.spec) == cell.twin
                ]
            self._proved[cell_id] = found[-1]
        return self._proved[cell_id]


def _id_of_proof(cell: CellSpec) -> str:
    """Return what is equal for cells that are proved alike but for their precision."""
    return f"{cell.id_without('precision')} {cell.twin}"
