"""The launcher of this machine: one cell at a time, each run in fresh processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.console import open_console
from vitsweep.errors import VitsweepError
from vitsweep.launchers.base import (
    LaunchRequest,
    LaunchResult,
    PreparedSweep,
    frozen_sweep,
    prepared,
)
from vitsweep.launchers.block_runner import BlockRunner
from vitsweep.launchers.local_race import run_race
from vitsweep.launchers.local_settings import LocalSettings
from vitsweep.launchers.progress import Progress
from vitsweep.launchers.unfinished_runs import record_unfinished
from vitsweep.planning.blocks import (
    BalancedOrder,
    Block,
    blocks_until_measured,
    runs_per_cell,
)
from vitsweep.planning.notices import print_notices
from vitsweep.planning.pending import ResumeState, resume_state
from vitsweep.planning.sweep_plan import cell_labels
from vitsweep.results.record import Status
from vitsweep.spec.machine import Machine


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
    resumed = runner.resume(plan, begin.missing_blocks, size, console)
    order = BalancedOrder.after(earlier)
    rounds = blocks_until_measured(plan, state, runner.records, size, order)
    progress = Progress(console, cell_labels(plan), 0)

    def planned() -> Iterator[Block]:
        for block in chain(resumed, rounds):
            lacking = runs_per_cell(plan, state().missing_blocks, size)
            progress.expects(max(lacking.total(), len(block.entries)))
            yield block

    stopped = runner.run(planned(), progress)
    if stopped:
        for training in runner.saved_trainings(plan):
            console.print(
                f"Training of cell {training.cell_id} is saved after step {training.step}: the same command "
                "continues it.",
                highlight=False,
            )
    return stopped
