"""Runs blocks on this machine, one after the other, each run in fresh processes."""

import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from vitsweep.errors import DISK_FULL_ERRNOS, VitsweepError
from vitsweep.execution.calibration import calibration_for
from vitsweep.execution.code_hash import Sources, changed_files
from vitsweep.execution.rank_processes import rendezvous
from vitsweep.execution.run_request import RunRequest, earlier_folders, run_id_of
from vitsweep.execution.supervisor import RunEnding, start_local_ranks, supervise, warm_up
from vitsweep.launchers.progress import Progress
from vitsweep.planning.blocks import Block, runs_per_cell, warm_up_cell
from vitsweep.planning.pending import MOST_FILES
from vitsweep.planning.predictions import predict_before_run
from vitsweep.planning.resume import InterruptedTraining, blocks_to_complete, interrupted_trainings
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, RunRecord, Status
from vitsweep.results.store import Store

SECONDS_TO_SAVE = 300.0
"""How long a training may take to save itself after Ctrl-C."""


@dataclass
class BlockRunner:
    """Runs blocks into a store.

    Attributes:
        store: where the records go.
        code: state of the code, as frozen with the cells.
        parallel: runs at a time; more than one disturbs the timing.
        earlier: records that were in the store when the command began.
        records: records that this command added, oldest first.
        skipped: cells that ended by themselves without being measured, such as `out_of_memory`; they
            would end the same way in the next block.
        interrupted: (block name, cell id) -> the interrupted training that continues there.
    """

    store: Store
    code: dict[str, Any]
    parallel: int = 1
    earlier: Sequence[RunRecord] = ()
    records: list[RunRecord] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    interrupted: dict[tuple[str, str], InterruptedTraining] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _proved: dict[str, str] = field(default_factory=dict)
    _predicted: set[str] = field(default_factory=set)

    def resume(
        self, plan: SweepPlan, missing: Mapping[str, int], cells_per_block: int, console: Console
    ) -> list[Block]:
        """Continue the trainings that were interrupted; return the blocks that they belong to."""
        lacking = runs_per_cell(plan, missing, cells_per_block)  # with the baselines beside them
        interrupted = interrupted_trainings(
            self.store,
            {cell_id: plan.entries[cell_id].code.hash for cell_id in lacking},
            self.earlier,
        )
        for training in interrupted:
            self.interrupted[training.block, training.cell_id] = training
            console.print(
                f"Training of cell {training.cell_id} continues: its last checkpoint is of step "
                f"{training.step}.",
                highlight=False,
            )
        return blocks_to_complete(interrupted, plan, missing, self.earlier, cells_per_block)

    def saved_trainings(self, plan: SweepPlan) -> list[InterruptedTraining]:
        """Return the trainings that this command began or continued, and that were interrupted."""
        hashes = {cell_id: entry.code.hash for cell_id, entry in plan.entries.items()}
        return interrupted_trainings(self.store, hashes, [*self.earlier, *self.records])

    def run(self, planned: Iterable[Block], progress: Progress) -> bool:
        """Run blocks as they come; True if the user stopped them.

        Args:
            planned: blocks, which may be generated from the results of the blocks before.
            progress: is updated with every run.

        Raises:
            VitsweepError: the sweep folder cannot be written any more.
        """
        try:
            with progress.shown(), sigterm_as_keyboard_interrupt():
                for number, block in enumerate(planned):
                    if number == 0:
                        self._warm_up(block, progress)
                    self._run_block(block, progress)
        except KeyboardInterrupt:
            return True
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            raise VitsweepError(
                f"`{self.store.root}` cannot be written any more ({error.strerror}). What was "
                "measured is kept: make room and run the same command again."
            ) from error
        return False

    def _run_block(self, block: Block, progress: Progress) -> None:
        with ThreadPoolExecutor(self.parallel) as pool:
            jobs = [
                pool.submit(self._run_one, block, position, entry, progress)
                for position, entry in enumerate(block.entries, start=block.first_position)
            ]
            try:
                for job in jobs:
                    job.result()
            except BaseException:  # Ctrl-C, or a full disk
                self._stopped.set()
                for job in jobs:
                    job.cancel()
                raise

    def _run_one(self, block: Block, position: int, entry: PlannedCell, progress: Progress) -> None:
        if entry.cell_id in self.skipped:
            progress.dropped(1)
            return
        progress.started(entry)
        self._predict(entry, progress)
        record = self._supervised(block, position, entry)
        if record.status == Status.measured:
            self._proved[entry.cell_id] = str(record.validity.get("proved") or "")
        elif record.status not in STOPPED_FROM_OUTSIDE:
            self.skipped.add(entry.cell_id)
        self.records.append(record)
        progress.ended(entry, record)

    def _predict(self, entry: PlannedCell, progress: Progress) -> None:
        """Predict a cell before this command runs it for the first time."""
        if entry.cell_id not in self._predicted:
            self._predicted.add(entry.cell_id)
            if reason := predict_before_run(entry, self.store):
                progress.not_predicted(entry, reason)

    def _warm_up(self, block: Block, progress: Progress) -> None:
        """Run a cell once before the first block and discard what it measures.

        A line of the cell's `attempts.jsonl` says that it ran; there is no record.
        """
        entry = warm_up_cell(block)
        if entry is None or entry.cell_id in self.skipped:
            return
        progress.warming_up(entry)
        with TemporaryDirectory(prefix="vitsweep-warm-up-") as folder:
            run = partial(warm_up, scratch=Path(folder) / "sweep")
            record = self._supervised(block, 0, entry, run)
        if record.status == Status.measured:
            self._proved[entry.cell_id] = str(record.validity.get("proved") or "")

    def _supervised(
        self,
        block: Block,
        position: int,
        entry: PlannedCell,
        run: Callable[..., RunRecord] = supervise,
    ) -> RunRecord:
        self._refuse_changed_code(entry)
        calibration = calibration_for(entry.spec, self.store, socket.gethostname())
        earlier = self.interrupted.get((block.name, entry.cell_id))
        name = earlier.name if earlier else f"{block.name}-{secrets.token_hex(3)}"
        attempt = earlier.attempt if earlier else 1
        folder = self.store.cell(entry.cell_id).absolute()
        with rendezvous() as init_method:
            request = RunRequest(
                sweep_folder=self.store.root.absolute(),
                cell_id=entry.cell_id,
                run_id=run_id_of(name, attempt),
                block=block.name,
                position=earlier.position if earlier else position,
                attempt=attempt,
                earlier=earlier_folders(folder, name, attempt),
                init_method=init_method,
                proved=self._proof(entry),
                calibration=calibration,
                environment={
                    "git_commit": self.code["git_commit"],
                    "git_dirty": self.code["git_dirty"],
                    "launcher": "local",
                    "cells_at_a_time": self.parallel,
                },
            )
            on_wait = self._stop_if_interrupted
            return run(request, entry.spec, start=start_local_ranks, on_wait=on_wait)

    def _proof(self, entry: PlannedCell) -> str:
        """Return how the cell was proved by this command or by an earlier run of the same code."""
        if entry.cell_id not in self._proved:
            found = [
                str(run.validity["proved"])
                for run in self.earlier
                if run.cell_id == entry.cell_id
                and run.status == Status.measured
                and run.validity.get("proved")
                and run.environment.get("code_hash") == entry.code.hash
            ]
            self._proved[entry.cell_id] = found[-1] if found else ""
        return self._proved[entry.cell_id]

    def _refuse_changed_code(self, entry: PlannedCell) -> None:
        """Stop where the code of a cell was edited while the command runs.

        Raises:
            VitsweepError: it was; blocks and intervals must not mix two states of the code.
        """
        now = Sources().of(entry.spec)
        if now.hash != entry.code.hash:
            changed = ", ".join(changed_files(entry.code.files, now.files)[:MOST_FILES])
            raise VitsweepError(
                f"The code was edited while the command runs ({changed}). What was measured is kept: "
                "the same command goes on with the code as it is then."
            )

    def _stop_if_interrupted(self) -> None:
        if self._stopped.is_set():
            raise RunEnding("The command was interrupted.", SECONDS_TO_SAVE)


@contextmanager
def sigterm_as_keyboard_interrupt() -> Iterator[None]:
    """Let SIGTERM stop the runs as Ctrl-C does, so that a training saves itself first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
