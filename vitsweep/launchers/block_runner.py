"""Runs blocks on this machine, one after the other, each run in fresh processes."""

import secrets
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from vitsweep.errors import DISK_FULL_ERRNOS, VitsweepError
from vitsweep.execution.calibration import calibration_for
from vitsweep.execution.rank_processes import rendezvous
from vitsweep.execution.run_request import RunRequest, earlier_folders, run_id_of
from vitsweep.execution.supervisor import RunEnding, start_local_ranks, supervise
from vitsweep.launchers.progress import Progress
from vitsweep.planning.blocks import Block
from vitsweep.planning.resume import Unfinished, completing_blocks, unfinished
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store

SECONDS_TO_SAVE = 60.0
"""How long a training may take to save itself after Ctrl-C."""


@dataclass
class BlockRunner:
    """Runs blocks into a store.

    Attributes:
        store: where the records go.
        code: state of the code, as frozen with the cells.
        parallel: runs at a time; more than one disturbs the timing.
        skipped: cells that were not measured once; they would end the same way in the next block.
        unfinished: (block name, cell id) -> the interrupted training that continues there.
    """

    store: Store
    code: dict[str, Any]
    parallel: int = 1
    skipped: set[str] = field(default_factory=set)
    unfinished: dict[tuple[str, str], Unfinished] = field(default_factory=dict)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _proved: dict[str, str] = field(default_factory=dict)

    def resume(
        self, plan: SweepPlan, missing: Mapping[str, int], cells_per_block: int, console: Console
    ) -> tuple[list[Block], dict[str, int]]:
        """Continue the trainings that were interrupted.

        Returns:
            The blocks that they belong to, and cell -> runs that are missing beside these.
        """
        runs = list(self.store.runs())
        interrupted = unfinished(self.store, list(missing), runs, self.code["git_commit"])
        for one in interrupted:
            self.unfinished[one.block, one.cell_id] = one
            console.print(
                f"Training of cell {one.cell_id} continues after step {one.step}.", highlight=False
            )
        return completing_blocks(interrupted, plan, missing, runs, cells_per_block)

    def run(self, planned: Iterable[Block], progress: Progress) -> bool:
        """Run blocks as they come; True if the user stopped them.

        Args:
            planned: blocks, which may be generated from the results of the blocks before.
            progress: is updated with every run.

        Raises:
            VitsweepError: the sweep folder cannot be written any more.
        """
        for run in self.store.runs():
            if run.status == Status.measured and run.validity.get("proved"):
                self._proved[run.cell_id] = str(run.validity["proved"])
        try:
            with progress.shown(), sigterm_as_keyboard_interrupt():
                for block in planned:
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
                for position, entry in enumerate(block.entries)
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
        record = self._supervised(block, position, entry)
        if record.status == Status.measured:
            self._proved[entry.cell_id] = str(record.validity.get("proved") or "")
        else:
            self.skipped.add(entry.cell_id)  # it would end the same way in the next block
        progress.ended(entry, record)

    def _supervised(self, block: Block, position: int, entry: PlannedCell) -> RunRecord:
        calibration = calibration_for(entry.spec, self.store, socket.gethostname())
        earlier = self.unfinished.get((block.name, entry.cell_id))
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
                proved=self._proved.get(entry.cell_id, ""),
                calibration=calibration,
                environment={
                    "git_commit": self.code["git_commit"],
                    "git_dirty": self.code["git_dirty"],
                    "launcher": "local",
                    "cells_at_a_time": self.parallel,
                },
            )
            return supervise(request, entry.spec, start_local_ranks, self._stop_if_interrupted)

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
