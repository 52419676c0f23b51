"""The launcher of this machine: one cell at a time, each run in fresh processes."""

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

from vitsweep import extras
from vitsweep.composition.composer import ComposedCell, Composer
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.console import interrupts_to, open_console
from vitsweep.errors import (
    STORAGE_ERRNOS,
    VitsweepError,
    storage_sentences,
)
from vitsweep.execution.attempts import Attempt, record_unfinished
from vitsweep.execution.run_request import Run, RunRequest
from vitsweep.execution.runner import LocalExecutor, RunEnding, Runner
from vitsweep.launchers.base import (
    LaunchRequest,
    LaunchResult,
    PreparedSweep,
    admitted,
    announce,
    frozen,
    prepared,
    rounds_of,
)
from vitsweep.launchers.progress import Progress
from vitsweep.planning.blocks import (
    Block,
    blocks_to_complete,
    interrupted_trainings,
    runs_per_cell,
    warm_up_cell,
)
from vitsweep.planning.freeze import open_store, planned_store
from vitsweep.planning.rounds import blocks_in_turn
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan, cell_labels, plan_of
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.results.sweeps import only_rounds
from vitsweep.spec.resources import Machine
from vitsweep.tables.formatting import count

SECONDS_TO_SAVE = 300.0
"""How long a training may take to save itself after Ctrl-C."""


@dataclass
class BlockRunner:
    """Runs blocks into a store.

    Attributes:
        store: where the records go.
        code: state of the code, as frozen with the cells.
        earlier: records that were in the store when the command began.
        any_look: the command looks at its intervals between blocks and stops by them; its records say so,
            and their intervals are `tables.stats.any_look_half_width`.
        records: records that this command added, oldest first.
        skipped: cells that ended by themselves without being measured, such as `out_of_memory`; they
            would end the same way in the next block.
        interrupted: (block name, cell id) -> the latest attempt at the training that continues there.
    """

    store: Store
    code: dict[str, Any]
    earlier: Sequence[RunRecord] = ()
    any_look: bool = False
    records: list[RunRecord] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    interrupted: dict[tuple[str, str], Attempt] = field(default_factory=dict)
    _is_stopped: bool = False
    _is_forced: bool = False

    def __post_init__(self) -> None:
        facts = {
            "git_commit": self.code.get("git_commit"),
            "git_dirty": self.code.get("git_dirty"),
            "launcher": "local",
            **({"any_look": True} if self.any_look else {}),
        }
        executor = LocalExecutor(self.store, facts)
        self._runner = Runner(self.store, executor, self._stop_if_interrupted)

    def resume(
        self, plan: SweepPlan, missing: Mapping[str, int], cells_per_block: int
    ) -> list[Block]:
        """Continue the trainings that were interrupted; return the blocks that they belong to."""
        lacking = runs_per_cell(plan, missing, cells_per_block)  # with their baselines
        interrupted = interrupted_trainings(
            self.store,
            {cell_id: plan.entries[cell_id].code.hash for cell_id in lacking},
            self.earlier,
        )
        for training in interrupted:
            self.interrupted[training.run.block, training.run.cell_id] = training
        return blocks_to_complete(interrupted, plan, missing, self.earlier, cells_per_block)

    def saved_trainings(self, plan: SweepPlan) -> list[Attempt]:
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
            with progress.shown(), interrupts_to(signal.default_int_handler):
                for number, block in enumerate(planned):
                    if number == 0:
                        self._warm_up(block, progress)
                    self._run_block(block, progress)
        except KeyboardInterrupt:
            return True
        except OSError as error:
            if error.errno not in STORAGE_ERRNOS:
                raise
            raise VitsweepError(storage_sentences(error)) from error
        return False

    def _run_block(self, block: Block, progress: Progress) -> None:
        """Run the cells of a block.

        Ctrl-C lets what runs end, a training saved; a second one ends it at once. Neither raises while
        a run goes on: a KeyboardInterrupt between two lines would lose it.
        """

        def interrupt(*_: object) -> None:
            self._is_stopped, self._is_forced = True, self._is_stopped
            if not self._is_forced:
                with suppress(RuntimeError):  # it came amid another line
                    progress.console.print("Stopping; Ctrl-C again to force.")

        with interrupts_to(interrupt), suppress(RunEnding):
            for position, entry in enumerate(block.entries, start=block.first_position):
                self._run_one(block, position, entry, progress)
        if self._is_stopped:
            raise KeyboardInterrupt

    def _run_one(self, block: Block, position: int, entry: PlannedCell, progress: Progress) -> None:
        if entry.cell_id in self.skipped:
            progress.dropped(1)
            return
        self._stop_if_interrupted()  # the run before may have ended after Ctrl-C
        progress.started(entry)
        try:
            record = self._runner.attempt(self._request(block, position, entry), entry.spec)
        except RunEnding as ending:
            if ending.record is None:
                raise
            record = ending.record
        if record.status not in (Status.measured, *STOPPED_FROM_OUTSIDE):
            self.skipped.add(entry.cell_id)
        self.records.append(record)
        progress.ended(entry, record)

    def _warm_up(self, block: Block, progress: Progress) -> None:
        """Run the baseline once before the first block; what it measures is shown and discarded.

        A line of the cell's `attempts.jsonl` says that it ran; there is no record.
        """
        entry = warm_up_cell(block)
        if entry is None or entry.cell_id in self.skipped or block.is_screening:
            return
        progress.warming_up(entry)
        self._runner.warm_up(self._request(block, 0, entry), entry.spec)
        progress.warmed_up(entry)

    def _request(self, block: Block, position: int, entry: PlannedCell) -> RunRequest:
        run, attempt = Run.new(block.name, position, entry.cell_id, block.purpose), 1
        if training := self.interrupted.get((block.name, entry.cell_id)):
            run, attempt = training.run, training.number + 1
        return self._runner.request(run, entry.spec, attempt, entry.code)

    def _stop_if_interrupted(self) -> None:
        if self._is_stopped:
            raise RunEnding(
                "The command was interrupted.", SECONDS_TO_SAVE, lambda: self._is_forced
            )


# The launcher: cells one after another, on this machine.


@contextmanager
def launch(request: LaunchRequest) -> Iterator[LaunchResult]:
    """Run what is missing of the cells; the sweep stays locked until the `with` block ends.

    Raises:
        BadValueError: a value is wrong; nothing has run.
        VitsweepError: a race of the same sweep runs on a cluster.
    """
    is_added = request.settings.search in extras.ROUNDS
    with (
        prepared(request) as sweep,
        only_rounds(sweep.store) if is_added else nullcontext(),
    ):
        record_unfinished(sweep.store, sweep.plan.entries)
        planned = planned_store(request.machine.device)
        for entry in sweep.plan.runnable:
            sweep.store.adopt_prediction(entry.cell_id, planned)
        yield _run(sweep, request)


def run_unlocked(cell: ComposedCell, settings: SweepSettings, composer: Composer) -> None:
    """Run one cell, and its baseline, while other processes run other cells of the same sweep.

    Stock launchers of Hydra run cells so. Nobody holds the lock and no table is shown: `vitsweep
    collect` makes it afterwards.

    Raises:
        VitsweepError: the cell was not measured; its record says so as well.
    """
    machine = Machine.here()
    plan, console = plan_of([cell], machine, composer), open_console(stderr=True)
    request = LaunchRequest(
        plan=plan, machine=machine, settings=settings, console=console, hydra=composer.words
    )
    store = open_store(settings)
    sweep = frozen(store, admitted(store, request))
    _run(sweep, request)
    [cell_id] = [entry.cell_id for entry in sweep.plan.named]
    runs = list(sweep.store.runs(cell_id))
    if not any(run.status == Status.measured for run in runs):
        last = [f"{run.status}: {run.reason}" for run in runs[-1:]]
        reasons = sweep.plan.entries[cell_id].reasons or last
        raise VitsweepError(f"Cell {cell_id} was not measured. {' '.join(reasons)}")


def _run(sweep: PreparedSweep, request: LaunchRequest) -> LaunchResult:
    """Run what is missing, or blocks until a race has ended."""
    plan, console = sweep.plan, request.console
    rounds = rounds_of(sweep, request.settings, chosen_by=request.rounds)
    begin = rounds.state(())
    announce(rounds, begin, sweep, console)
    runner = BlockRunner(sweep.store, sweep.code, rounds.earlier, rounds.is_bounded)
    runner.skipped |= set(begin.not_measured)
    resumed = runner.resume(plan, *rounds.to_resume())
    minutes = request.settings.minutes
    progress = Progress(console, cell_labels(plan), 0, inf if minutes is None else 60 * minutes)
    progress.expects(rounds.num_runs(()))
    planned = blocks_in_turn(rounds, runner.records, resumed, progress.expects)
    stopped = runner.run(planned, progress)
    undecided = 0
    if rounds.is_bounded and not stopped and not request.rounds:
        undecided = len(rounds.state(runner.records).missing_blocks)
    if undecided:
        console.print(
            f"The {minutes:g} min of `sweep.minutes` are over; {count(undecided, 'cell')} not decided: the "
            "same command goes on."
        )
    elif stopped:
        rounds.stopped(runner.records)
        for training in runner.saved_trainings(plan):
            console.print(
                f"Training of cell {training.run.cell_id} is saved after step {training.saved_step}: the "
                "same command continues it.",
            )
    return LaunchResult(
        store=sweep.store,
        plan=plan,
        interrupted=stopped,
        state=rounds.state(runner.records),
        reached=progress.reached,
    )
