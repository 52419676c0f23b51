"""The launcher of this machine: one cell at a time, each run in fresh processes."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

from annotated_types import Gt

from vitsweep.composition.composer import ComposedCell, Composer
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.console import open_console
from vitsweep.errors import BadValueError, VitsweepError, did_you_mean
from vitsweep.execution.attempts import record_unfinished
from vitsweep.launchers.base import (
    LaunchRequest,
    LaunchResult,
    PreparedSweep,
    frozen_sweep,
    prepared,
)
from vitsweep.launchers.block_runner import BlockRunner
from vitsweep.launchers.progress import Progress
from vitsweep.planning.blocks import (
    BalancedOrder,
    Block,
    blocks_until_measured,
    look_blocks,
    repeated_runs,
    runs_per_cell,
)
from vitsweep.planning.pending import ResumeState, print_notices, resume_state
from vitsweep.planning.predictions import keep_predictions, traced_throughput
from vitsweep.planning.sweep_plan import cell_labels
from vitsweep.racing.rounds import RaceRounds, describe_refused
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import Status
from vitsweep.spec.from_yaml import section_from_tree
from vitsweep.spec.resources import Machine

# A race on this machine: blocks one after the other, each chosen from the runs of those before.


def run_race(sweep: PreparedSweep, request: LaunchRequest, parallel: int) -> bool:
    """Run blocks until the race has ended; True if the user stopped it.

    Raises:
        BadValueError: the race cannot begin, see `RaceRounds.check`.
    """
    store, plan, console = sweep.store, sweep.plan, request.console
    earlier = list(store.runs())
    predicted = traced_throughput(plan)
    rounds = RaceRounds(plan, request.settings, store, sweep.code, earlier, predicted=predicted)
    rounds.check()
    if refused := describe_refused(plan):
        console.print(refused, highlight=False)
    runner = BlockRunner(store, sweep.code, parallel, earlier)
    begin = rounds.state(())
    print_notices(begin, plan, store, f"`vitsweep retry {store.name}` runs them again", console)
    runner.skipped |= set(begin.not_measured)
    once = {e.cell_id: 1 for e in plan.runnable if e.cell_id not in begin.not_measured}
    resumed = runner.resume(plan, once, 1, console)
    progress = Progress(console, cell_labels(plan), 0)

    def raced() -> Iterator[Block]:
        while blocks := rounds.next(runner.records):
            for number, block in enumerate(blocks):
                progress.expects(sum(len(b.entries) for b in blocks[number:]))
                yield block
                if repeated := repeated_runs(block, runner.records, rounds.state(runner.records)):
                    yield repeated

    interrupted = runner.run(chain(resumed, raced()), progress)
    if interrupted:
        rounds.note(runner.records)
    return interrupted


# LocalSettings: the fields of conf/hydra/launcher/local.yaml, typed and checked.


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """Settings of the launcher of this machine.

    Attributes:
        parallel: cells that run at the same time.
        objective: column of a cell's row that an optimizing sweeper is given.
    """

    parallel: Annotated[int, Gt(0)]
    objective: str


def local_settings(fields: Mapping[str, Any]) -> LocalSettings:
    """Type the launcher's fields.

    Raises:
        BadValueError: a field is unknown, missing or has a wrong value; all such are named.
    """
    settings: LocalSettings = section_from_tree(LocalSettings, fields, "hydra.launcher")
    check_objective(settings.objective)
    return settings


def check_objective(objective: str) -> None:
    """Refuse an objective that is no column of a cell, before a sweep is measured for it.

    Raises:
        BadValueError: it is none of the metrics.
    """
    if objective not in METRICS:
        raise BadValueError(
            f"`hydra.launcher.objective={objective}` is no measured column, such as "
            "`images_per_second`, `speedup` or `peak_gib`."
            + did_you_mean(objective, METRICS, lambda name: f"hydra.launcher.objective={name}")
        )


@contextmanager
def launch(request: LaunchRequest, settings: LocalSettings) -> Iterator[LaunchResult]:
    """Run what is missing of the cells; the sweep stays locked until the `with` block ends.

    Raises:
        BadValueError: a value is wrong; nothing has run.
    """
    with prepared(request, Machine.here()) as sweep:
        record_unfinished(sweep.store, sweep.plan.entries)
        is_race = request.settings.search == "race"
        interrupted = (run_race if is_race else _run)(sweep, request, settings.parallel)
        yield LaunchResult(
            store=sweep.store, plan=sweep.plan, interrupted=interrupted, is_race=is_race
        )
        if not interrupted and keep_predictions(sweep.plan, sweep.store, request.console):
            from vitsweep.report.views import collect

            collect(sweep.store)  # the views have the predictions, and later plans their errors


def run_unlocked(cell: ComposedCell, settings: SweepSettings, composer: Composer) -> None:
    """Run one cell, and its baseline, while other processes run other cells of the same sweep.

    Stock launchers of Hydra run cells so. Nobody holds the lock and no table is shown: `vitsweep
    collect` makes it afterwards.

    Raises:
        VitsweepError: the cell was not measured; its record says so as well.
    """
    request = LaunchRequest(
        cells=[cell], settings=settings, composer=composer, console=open_console()
    )
    sweep = frozen_sweep(request, Machine.here())
    _run(sweep, request, parallel=1)
    [cell_id] = [
        entry.cell_id for entry in sweep.plan.entries.values() if not entry.is_added_baseline
    ]
    runs = list(sweep.store.runs(cell_id))
    if not any(run.status == Status.measured for run in runs):
        last = [f"{run.status}: {run.reason}" for run in runs[-1:]]
        reasons = sweep.plan.entries[cell_id].reasons or last
        raise VitsweepError(f"Cell {cell_id} was not measured. {' '.join(reasons)}")


def _run(sweep: PreparedSweep, request: LaunchRequest, parallel: int) -> bool:
    """Run what is missing; True if the user stopped it."""
    store, plan, console = sweep.store, sweep.plan, request.console
    settings, earlier = request.settings, list(store.runs())
    runner = BlockRunner(store, sweep.code, parallel, earlier)

    def state() -> ResumeState:
        return resume_state(plan, earlier, settings, sweep.code, runner.records)

    begin, size = state(), settings.cells_per_block
    print_notices(begin, plan, store, f"`vitsweep retry {store.name}` runs them again", console)
    if not begin.missing_blocks and not begin.not_measured and plan.runnable:
        console.print("Everything that was asked for is measured already.")
    looks = list(look_blocks(plan, begin, settings))
    resumed = runner.resume(plan, begin.missing_blocks, size, console)
    order = BalancedOrder.after(earlier)
    rounds = blocks_until_measured(plan, state, runner.records, size, order)
    progress = Progress(console, cell_labels(plan), 0)

    def planned() -> Iterator[Block]:
        for number, block in enumerate(chain(looks, resumed, rounds)):
            runs = runs_per_cell(plan, state().missing_blocks, size)
            runs += Counter(entry.cell_id for look in looks[number:] for entry in look.entries)
            progress.expects(runs if runs.total() > len(block.entries) else len(block.entries))
            yield block

    stopped = runner.run(planned(), progress)
    if stopped:
        for training in runner.saved_trainings(plan):
            console.print(
                f"Training of cell {training.run.cell_id} is saved after step {training.saved_step}: the "
                "same command continues it.",
                highlight=False,
            )
    return stopped
