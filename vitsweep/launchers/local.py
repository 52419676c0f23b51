"""The launcher of this machine: one cell at a time, each run in fresh processes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Annotated, Any

from annotated_types import Gt
from rich.console import Console

from vitsweep.composition.composer import ComposedCell, Composer
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.console import open_console
from vitsweep.errors import BadValueError, VitsweepError, did_you_mean
from vitsweep.execution.attempts import record_unfinished
from vitsweep.launchers.base import (
    LaunchRequest,
    LaunchResult,
    PreparedSweep,
    announce,
    announce_undecided,
    frozen_sweep,
    prepared,
    rounds_of,
)
from vitsweep.launchers.block_runner import BlockRunner
from vitsweep.launchers.few_files import keep_few_files
from vitsweep.launchers.progress import Progress
from vitsweep.planning.blocks import Block
from vitsweep.planning.predictions import keep_predictions
from vitsweep.planning.rounds import blocks_in_turn
from vitsweep.planning.sweep_plan import cell_labels
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import MANY_FILES, Store
from vitsweep.spec.from_yaml import section_from_tree
from vitsweep.spec.resources import Machine


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
            f"`hydra.launcher.objective={objective}` is no measured column."
            + did_you_mean(objective, METRICS, lambda name: f"hydra.launcher.objective={name}")
            + " Such are `images_per_second`, `speedup` and `peak_gib`."
        )


@contextmanager
def launch(request: LaunchRequest, settings: LocalSettings) -> Iterator[LaunchResult]:
    """Run what is missing of the cells; the sweep stays locked until the `with` block ends.

    Raises:
        BadValueError: a value is wrong; nothing has run.
        VitsweepError: a race of the same sweep runs on a cluster.
    """
    is_race = request.settings.search == "race"
    with (
        prepared(request, Machine.here()) as sweep,
        sweep.store.only_rounds() if is_race else nullcontext(),
    ):
        record_unfinished(sweep.store, sweep.plan.entries)
        interrupted = _run(sweep, request, settings.parallel)

        @cache
        def predict() -> None:
            if not interrupted and keep_predictions(sweep.plan, sweep.store, request.console):
                from vitsweep.report.views import collect

                collect(sweep.store)  # the views have the predictions, and later plans their errors

        yield LaunchResult(
            store=sweep.store,
            plan=sweep.plan,
            interrupted=interrupted,
            is_race=is_race,
            predict=predict,
        )
        predict()


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
    """Run what is missing, or blocks until a race has ended; True if the user stopped it."""
    plan, console = sweep.plan, request.console
    rounds = rounds_of(sweep, request.settings)
    begin = rounds.state(())
    announce(rounds, begin, sweep, console)
    runner = BlockRunner(sweep.store, sweep.code, parallel, rounds.earlier, rounds.is_bounded)
    runner.skipped |= set(begin.not_measured)
    resumed = runner.resume(plan, *rounds.to_resume(), console)
    minutes = request.settings.minutes
    progress = Progress(console, cell_labels(plan), 0, inf if minutes is None else 60 * minutes)
    progress.expects(rounds.num_runs(()))
    planned = blocks_in_turn(rounds, runner.records, resumed, progress.expects)
    stopped = runner.run(_packed(planned, sweep.store, runner.records, console), progress)
    if not stopped:
        announce_undecided(rounds, runner.records, request.settings, console)
    else:
        rounds.stopped(runner.records)
        for training in runner.saved_trainings(plan):
            console.print(
                f"Training of cell {training.run.cell_id} is saved after step {training.saved_step}: the "
                "same command continues it.",
            )
    return stopped


def _packed(
    blocks: Iterable[Block], store: Store, records: Sequence[RunRecord], console: Console
) -> Iterator[Block]:
    """Pass blocks on; between two, pack the files of many runs."""
    num_packed = 0
    for block in blocks:
        yield block
        if len(records) - num_packed >= MANY_FILES:
            num_packed = len(records)
            keep_few_files(store, console)
