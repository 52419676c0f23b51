"""The launcher of this machine, and the loop of runs of a command."""

import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
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
from vitsweep.execution.runner import Executor, LocalExecutor, RunEnding, Runner
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
from vitsweep.launchers.loop import WARM_UP, RunLoop
from vitsweep.launchers.progress import Progress
from vitsweep.planning.blocks import (
    Block,
    blocks_to_complete,
    interrupted_trainings,
    runs_per_cell,
    seconds_of_block,
    warm_up_cell,
)
from vitsweep.planning.freeze import open_store, planned_store
from vitsweep.planning.rounds import blocks_in_turn
from vitsweep.planning.sweep_plan import PlannedCell, cell_labels, plan_of
from vitsweep.results.record import STOPPED_FROM_OUTSIDE, RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.results.sweeps import only_rounds
from vitsweep.spec.resources import Machine
from vitsweep.tables.formatting import count, duration

SECONDS_TO_SAVE = 300.0
"""How long a training may take to save itself after Ctrl-C."""


@dataclass
class Lifetime:
    """Until when runs begin, and what ends the one that goes on: Ctrl-C, SIGTERM or SIGUSR2.

    Attributes:
        ends_at: when time is over, on the monotonic clock; no run begins that would not end before.
        setting: what was typed for it.
        is_stopped: no further run begins.
        is_forced: a training that saves itself is not waited for.
    """

    ends_at: float = inf
    setting: str = ""
    is_stopped: bool = False
    is_forced: bool = False

    @property
    def left_s(self) -> float:
        """Seconds until time is over."""
        return self.ends_at - time.monotonic()

    def lacks(
        self, run: Run, cell: PlannedCell, known: Iterable[RunRecord], most_s: float = 0.0
    ) -> str:
        """Say that a run would not end in time, and what helps; "" where it would.

        Args:
            run: the run.
            cell: its cell.
            known: records that tell how long it takes.
            most_s: seconds that the same command has for a run.
        """
        if (left_s := self.left_s) == inf:
            return ""
        takes = seconds_of_block(Block(run.block, (cell,)), known)
        if left_s >= takes:
            return ""
        helps = "the same command goes on" if takes < most_s else "give it more"
        left = duration(max(left_s, 0.0))
        has = f"{left} of `{self.setting}` are left"
        return f"The next run takes about {duration(takes)}, and {has}: {helps}."

    def stop(self) -> None:
        """Let what runs end, a training saved; called again, end it at once."""
        self.is_stopped, self.is_forced = True, self.is_stopped

    def check(self) -> None:
        """Called while ranks run.

        Raises:
            RunEnding: the run must end.
        """
        if self.is_stopped:
            raise RunEnding("The command was interrupted.", SECONDS_TO_SAVE, lambda: self.is_forced)


@dataclass(kw_only=True)
class CommandLoop(RunLoop[PlannedCell]):
    """The loop of a command: shows each run, and ends with the command's lifetime.

    Attributes:
        progress: is updated with every run.
        lifetime: until when it does runs; its `check` is `on_wait` of the runner.
        most_s: seconds that were left as it began.
        earlier: records that were in the store before: they tell how long a run takes.
        records: that it added, oldest first.
        skipped: cells that ended by themselves without being measured, such as `out_of_memory`; they
            would end the same way in the next block.
    """

    progress: Progress
    lifetime: Lifetime
    most_s: float = inf
    earlier: Sequence[RunRecord] = ()
    records: list[RunRecord] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)

    def run(self, coming: Iterable[tuple[Run, PlannedCell]]) -> bool:
        """Do runs as they come, which may be generated from the results of those before.

        Returns:
            True if the user stopped them.

        Raises:
            VitsweepError: the sweep folder cannot be written any more.
        """
        try:
            with self.progress.shown(), interrupts_to(signal.default_int_handler):
                return super().run(coming)
        except KeyboardInterrupt:
            return True
        except OSError as error:
            if error.errno not in STORAGE_ERRNOS:
                raise
            raise VitsweepError(storage_sentences(error)) from error

    def do(self, run: Run, cell: PlannedCell) -> None:
        """Do a run.

        Ctrl-C lets it end, a training saved; a second one ends it at once. Neither raises while it goes
        on: a KeyboardInterrupt between two lines would lose it.
        """
        if cell.cell_id in self.skipped:
            self.progress.dropped(run.purpose != WARM_UP)
            return

        def interrupt(*_: object) -> None:
            self.lifetime.stop()
            if not self.lifetime.is_forced:
                with suppress(RuntimeError):  # it came amid another line
                    self.progress.console.print("Stopping; Ctrl-C again to force.")

        with interrupts_to(interrupt), suppress(RunEnding):
            super().do(run, cell)
        if self.lifetime.is_stopped:
            raise KeyboardInterrupt

    def lacks(self, run: Run, cell: PlannedCell) -> str:
        """Say which nodes are missing to begin a run, or that the time is."""
        known = [*self.earlier, *self.records]
        if late := self.lifetime.lacks(run, cell, known, self.most_s):
            return late
        lost = self.runner.executor.lacks(cell.spec)
        return lost and f"{lost}: the same command goes on."

    def request(self, run: Run, cell: PlannedCell) -> RunRequest:
        """Return the request of the next attempt, of the code that was planned."""
        return self.runner.request(run, cell.spec, planned=cell.code)

    def warm_up(self, request: RunRequest, cell: PlannedCell) -> RunRecord:
        """Warm the machine up."""
        self.progress.warming_up(cell)
        record = self.runner.warm_up(request, cell.spec)
        self.progress.warmed_up(cell)
        return record

    def attempt(self, request: RunRequest, cell: PlannedCell) -> RunRecord:
        """Make an attempt at a run; one whose ranks had just finished as it was interrupted counts."""
        self.progress.started(cell)
        try:
            record = self.runner.attempt(request, cell.spec)
        except RunEnding as ending:
            if ending.record is None:
                raise
            record = ending.record
        if record.status not in (Status.measured, *STOPPED_FROM_OUTSIDE):
            self.skipped.add(cell.cell_id)
        self.records.append(record)
        self.progress.ended(cell, record)
        return record


def runs_of(
    blocks: Iterable[Block], trainings: Iterable[Attempt] = ()
) -> Iterator[tuple[Run, PlannedCell]]:
    """Name the runs of blocks; before the first block its baseline warms the machine up.

    Args:
        blocks: as they come.
        trainings: interrupted ones, which go on in their blocks.
    """
    begun = {(t.run.block, t.run.cell_id): t.run for t in trainings}
    for number, block in enumerate(blocks):
        entry = None if number or block.is_screening else warm_up_cell(block)
        if entry:
            yield Run.new(block.name, 0, entry.cell_id, WARM_UP), entry
        for position, entry in enumerate(block.entries, start=block.first_position):
            run = Run.new(block.name, position, entry.cell_id, block.purpose)
            yield begun.get((block.name, entry.cell_id), run), entry


# The launcher: cells one after another, on this machine or on the nodes that an executor has.


OpenExecutor = Callable[[Store, Mapping[str, Any]], AbstractContextManager[Executor]]
"""Called with the sweep and columns of every record; holds what starts ranks until its block ends."""


@contextmanager
def on_this_machine(store: Store, facts: Mapping[str, Any]) -> Iterator[Executor]:
    """Hold the executor of this machine."""
    yield LocalExecutor(store, {"launcher": "local", **facts})


@contextmanager
def launch(
    request: LaunchRequest,
    opened: OpenExecutor = on_this_machine,
    lifetime: Lifetime | None = None,
) -> Iterator[LaunchResult]:
    """Run what is missing of the cells; the sweep stays locked until the `with` block ends.

    Args:
        request: the cells.
        opened: opens what starts their ranks, once there is a run to do.
        lifetime: until when runs begin.

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
        yield _run(sweep, request, opened, lifetime or Lifetime())


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
    _run(sweep, request, on_this_machine, Lifetime())
    [cell_id] = [entry.cell_id for entry in sweep.plan.named]
    runs = list(sweep.store.runs(cell_id))
    if not any(run.status == Status.measured for run in runs):
        last = [f"{run.status}: {run.reason}" for run in runs[-1:]]
        reasons = sweep.plan.entries[cell_id].reasons or last
        raise VitsweepError(f"Cell {cell_id} was not measured. {' '.join(reasons)}")


def _run(
    sweep: PreparedSweep, request: LaunchRequest, opened: OpenExecutor, lifetime: Lifetime
) -> LaunchResult:
    """Run what is missing, or blocks until a race has ended."""
    store, plan, console = sweep.store, sweep.plan, request.console
    rounds = rounds_of(sweep, request.settings, chosen_by=request.rounds)
    begin, records = rounds.state(()), list[RunRecord]()
    announce(rounds, begin, sweep, console)
    hashes = {cell_id: entry.code.hash for cell_id, entry in plan.entries.items()}
    missing, size = rounds.to_resume()
    lacking = runs_per_cell(plan, missing, size)  # with their baselines
    trainings = interrupted_trainings(store, {c: hashes[c] for c in lacking}, rounds.earlier)
    resumed = blocks_to_complete(trainings, plan, missing, rounds.earlier, size)
    minutes = request.settings.minutes
    progress = Progress(console, cell_labels(plan), 0, inf if minutes is None else 60 * minutes)
    progress.expects(rounds.num_runs(()))
    coming = runs_of(blocks_in_turn(rounds, records, resumed, progress.expects), trainings)
    facts = {key: sweep.code.get(key) for key in ("git_commit", "git_dirty")}
    facts |= {"any_look": True} if rounds.is_bounded else {}
    stopped, cut_short = False, ""
    if first := next(coming, None):
        cut_short = lifetime.lacks(*first, rounds.earlier)
    if first and not cut_short:
        with opened(store, facts) as executor:
            loop = CommandLoop(
                runner=Runner(store, executor, lifetime.check),
                records=records,
                skipped={*begin.not_measured},
                progress=progress,
                lifetime=lifetime,
                most_s=lifetime.left_s,
                earlier=rounds.earlier,
            )
            stopped = loop.run(chain([first], coming))
            cut_short = loop.cut_short
    undecided = 0
    if rounds.is_bounded and not stopped and not request.rounds:
        undecided = len(rounds.state(records).missing_blocks)
    if cut_short:
        console.print(cut_short)
    elif undecided:
        console.print(
            f"The {minutes:g} min of `sweep.minutes` are over; {count(undecided, 'cell')} not decided: the "
            "same command goes on."
        )
    elif stopped:
        rounds.stopped(records)
        for training in interrupted_trainings(store, hashes, [*rounds.earlier, *records]):
            console.print(
                f"Training of cell {training.run.cell_id} is saved after step {training.saved_step}: the "
                "same command continues it.",
            )
    return LaunchResult(
        store=store,
        plan=plan,
        interrupted=stopped,
        cut_short=bool(cut_short),
        state=rounds.state(records),
        reached=progress.reached,
    )
