"""The launcher of this machine: one cell at a time, each run in fresh processes."""

import errno
import secrets
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from vitsweep.console import open_console
from vitsweep.errors import VitsweepError
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.machine import Machine
from vitsweep.sweep.asked import Asked
from vitsweep.sweep.blocks import Block, blocks
from vitsweep.sweep.calibration import calibration_for
from vitsweep.sweep.code_state import code_state
from vitsweep.sweep.compose import Composer
from vitsweep.sweep.finish import Ending, finish
from vitsweep.sweep.make import freeze, open_store, roster_of
from vitsweep.sweep.missing import Known, known
from vitsweep.sweep.progress import Progress, labels
from vitsweep.sweep.ranks import rendezvous
from vitsweep.sweep.request import RunRequest, earlier_folders, run_id_of
from vitsweep.sweep.roster import Entry, Roster
from vitsweep.sweep.supervise import RunEnding, start_here, supervise
from vitsweep.sweep.unfinished import Unfinished, completing_blocks, unfinished

SECONDS_TO_SAVE = 60.0
"""How long a training may take to save itself after Ctrl-C."""


def launch(
    asked: Sequence[Asked],
    config: dict[str, Any],
    fields: dict[str, Any],
    composer: Composer,
    ending: Ending = finish,
) -> list[Mapping[str, Any]]:
    """Run what is missing of the cells; return the row of each, in the order asked for.

    Args:
        asked: cells of the command.
        config: composed configuration; its `sweep` node says where results go.
        fields: of conf/hydra/launcher/local.yaml.
        composer: composes the baselines.
        ending: what is done with the rows at the end: tables, charts and the report, or nothing.

    Raises:
        BadValueError: a value is wrong; nothing has run.
        SystemExit: 130 after Ctrl-C.
    """
    console = open_console()
    roster = roster_of(asked, Machine.here(), composer)
    store = open_store(config)

    def told() -> None:
        console.print(f"Another command is measuring into `{store.root}`; waiting for it to end.")

    with store.lock(on_wait=told):
        code = code_state()
        freeze(store, roster, config, code)
        runner = _Runner(store, roster, config, code, console, int(fields.get("parallel", 1)))
        interrupted = runner.run()
        return ending(store, roster, console, interrupted, config.get("tracker"))


def run_beside_others(asked: Asked, config: dict[str, Any], composer: Composer) -> None:
    """Run one cell, and its baseline, while other processes run other cells of the same sweep.

    So a stock launcher of Hydra runs them. There is no lock to wait for and no table: `collect`
    makes it afterwards.

    Raises:
        VitsweepError: the cell ended otherwise than measured; its record says so as well.
    """
    roster, store, code = (
        roster_of([asked], Machine.here(), composer),
        open_store(config),
        code_state(),
    )
    freeze(store, roster, config, code)
    _Runner(store, roster, config, code, open_console(), parallel=1).run()
    [cell_id] = [entry.cell_id for entry in roster.entries.values() if not entry.added]
    ends = [run for run in store.runs() if run.cell_id == cell_id]
    if not any(run.status == Status.measured for run in ends):
        reasons = roster.entries[cell_id].reasons or [f"{r.status}: {r.reason}" for r in ends[-1:]]
        raise VitsweepError(f"Cell {cell_id} was not measured. {' '.join(reasons)}")


@dataclass
class _Runner:
    store: Store
    roster: Roster
    config: dict[str, Any]
    code: dict[str, Any]
    console: Console
    parallel: int
    _stopped: threading.Event = field(default_factory=threading.Event)
    _unfinished: dict[tuple[str, str], Unfinished] = field(default_factory=dict)
    _over: set[str] = field(default_factory=set)
    _proved: dict[str, str] = field(default_factory=dict)

    def run(self) -> bool:
        """Run all blocks; True if the user stopped them."""
        todo = self._known()
        cells_per_block = int(self.config["sweep"].get("cells_per_block", 8))
        runs, commit = list(self.store.runs()), self.code["git_commit"]
        for one in unfinished(self.store, list(todo.missing), runs, commit):
            self._unfinished[one.block, one.cell_id] = one
        first, missing = completing_blocks(
            list(self._unfinished.values()), self.roster, todo.missing, runs, cells_per_block
        )
        planned = [*first, *blocks(self.roster, missing, cells_per_block)]
        self._announce(todo, planned)
        progress = Progress(self.console, labels(self.roster), sum(len(b.entries) for b in planned))
        try:
            with progress.shown(), terminated_like_interrupted():
                for block in planned:
                    self._run_block(block, progress)
        except KeyboardInterrupt:
            return True
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            raise VitsweepError(
                f"`{self.store.root}` cannot be written any more ({error.strerror}). What was "
                "measured is kept: make room and run the same command again."
            ) from error
        return False

    def _known(self) -> Known:
        settings = self.config["sweep"]
        found = known(
            self.roster,
            self.store.runs(),
            torch_version=self.code["packages"]["torch"],
            git_commit=self.code["git_commit"],
            remeasure=bool(settings["remeasure"]),
            retry=tuple(settings.get("retry") or ()),
        )
        for run in self.store.runs():
            if run.status == Status.measured and run.validity.get("proved"):
                self._proved[run.cell_id] = str(run.validity["proved"])
        return found

    def _announce(self, todo: Known, planned: list[Block]) -> None:
        if todo.other_code:
            self.console.print(
                f"{len(todo.other_code)} cells were measured with another state of the code and are "
                "used as they are; `sweep.remeasure=true` measures them anew.",
                highlight=False,
            )
        if todo.ended:
            self.console.print(
                f"{len(todo.ended)} cells ended otherwise and are not repeated; "
                f"`vitsweep retry {self.store.name}` runs them again.",
                highlight=False,
            )
        for one in self._unfinished.values():
            self.console.print(
                f"A training of cell {one.cell_id} goes on after step {one.step}.", highlight=False
            )
        if not planned and self.roster.runnable:
            self.console.print("Everything that was asked for is measured already.")

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

    def _run_one(self, block: Block, position: int, entry: Entry, progress: Progress) -> None:
        if entry.cell_id in self._over:
            progress.dropped(1)
            return
        progress.started(entry)
        record = self._supervised(block, position, entry)
        if record.status == Status.measured:
            self._proved[entry.cell_id] = str(record.validity.get("proved") or "")
        else:
            self._over.add(entry.cell_id)  # it would end the same way in the next block
        progress.ended(entry, record)

    def _supervised(self, block: Block, position: int, entry: Entry) -> RunRecord:
        calibration = calibration_for(entry.cell, self.store, socket.gethostname())
        earlier = self._unfinished.get((block.name, entry.cell_id))
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
            return supervise(request, entry.cell, start_here, self._stop_if_told)

    def _stop_if_told(self) -> None:
        if self._stopped.is_set():
            raise RunEnding("The command was interrupted.", SECONDS_TO_SAVE)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM stop the runs as Ctrl-C does: a training saves itself first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
