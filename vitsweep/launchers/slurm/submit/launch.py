"""The Slurm launcher: freezes cells, groups them by requested resources, submits job arrays."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.errors import BadValueError
from vitsweep.launchers.base import LaunchRequest, LaunchResult, PreparedSweep, locked, prepared
from vitsweep.launchers.slurm.state.job_files import JobArray
from vitsweep.launchers.slurm.state.poll import pending_runs
from vitsweep.launchers.slurm.state.reconcile import reconcile
from vitsweep.launchers.slurm.state.slurm_cli import require_slurm
from vitsweep.launchers.slurm.state.watch import watch
from vitsweep.launchers.slurm.submit.cluster import machine_of, max_array_size
from vitsweep.launchers.slurm.submit.packing import pack, without_unpaired_baselines
from vitsweep.launchers.slurm.submit.run_minutes import run_minutes
from vitsweep.launchers.slurm.submit.sbatch import submit
from vitsweep.launchers.slurm.submit.slurm_race import check_race, run_race
from vitsweep.launchers.slurm.submit.slurm_settings import SlurmSettings
from vitsweep.planning.blocks import BalancedOrder
from vitsweep.planning.notices import print_notices
from vitsweep.planning.pending import ResumeState, resume_state
from vitsweep.planning.prediction_before_run import predict_before_submission
from vitsweep.planning.provenance import code_folder
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.find import sweep_argument
from vitsweep.results.store import Store
from vitsweep.tables.formatting import count


@contextmanager
def launch(request: LaunchRequest, settings: SlurmSettings) -> Iterator[LaunchResult]:
    """Submit the missing runs of the cells, and wait until they have run.

    With `hydra.launcher.wait=false` the result is `submitted` as soon as Slurm has the jobs. Ctrl-C
    detaches: the jobs continue. The sweep is locked while jobs are submitted, and while the result is
    summarized, not while the jobs run.

    Raises:
        VitsweepError: a value is wrong, or Slurm refuses.
    """
    is_race = request.settings.search == "race"
    if is_race:
        check_race(settings)
    require_slurm()
    console = request.console
    if is_race:
        with prepared(request, machine_of(settings)) as sweep:
            pass
        yield from _raced(sweep, request, settings)
        return
    with prepared(request, machine_of(settings)) as sweep:
        watched = _submit_missing(sweep, request.settings, settings, console)
    store, plan = sweep.store, sweep.plan
    if not settings.wait:
        console.print(_next_commands(store), highlight=False)
        yield LaunchResult(store=store, plan=plan, submitted=True)
        return
    detached = not watch(store, plan, watched, console)
    if detached:
        console.print(f"Detached; the jobs continue. {_next_commands(store)}", highlight=False)
        yield LaunchResult(store=store, plan=plan, interrupted=True, submitted=True)
        return
    with locked(store, console):
        yield LaunchResult(store=store, plan=plan)


def _raced(
    sweep: PreparedSweep, request: LaunchRequest, settings: SlurmSettings
) -> Iterator[LaunchResult]:
    """Run the rounds of a race; the sweep is locked while one is chosen, not while its jobs run."""
    store, plan, console = sweep.store, sweep.plan, request.console
    if not run_race(sweep, request, settings):
        console.print(
            f"Detached; the jobs continue, and the same command goes on with the race. "
            f"{_next_commands(store)}",
            highlight=False,
        )
        yield LaunchResult(store=store, plan=plan, interrupted=True, submitted=True, is_race=True)
        return
    with locked(store, console):
        yield LaunchResult(store=store, plan=plan, is_race=True)


def _submit_missing(
    sweep: PreparedSweep,
    sweep_settings: SweepSettings,
    settings: SlurmSettings,
    console: Console,
) -> list[JobArray]:
    """Submit the runs that neither the store nor a live job has; return all live arrays."""
    begin = time.monotonic()
    store, plan, code = sweep.store, sweep.plan, sweep.code
    job_states = reconcile(store)
    earlier, pending = list(store.runs()), pending_runs(job_states)
    found = resume_state(
        without_unpaired_baselines(plan, settings),
        earlier,
        sweep_settings,
        code,
        pending=[(run.cell_id, run.block) for run in pending],
    )
    predicted = predict_before_submission(
        [plan.entries[c] for c, n in found.missing_blocks.items() if n], store
    )
    minutes = run_minutes(plan, earlier, predicted, settings.minutes_per_run)
    planned = {run.cell_id for run in pending} & plan.entries.keys()
    live = [state.job.array for state in job_states if state.is_live and planned]
    _announce(store, plan, found, len(pending), console)
    folder = code_folder(store, snapshot=sweep_settings.snapshot_code)
    array_size, new = max_array_size(settings), []
    for request, jobs in pack(
        plan,
        found.missing_blocks,
        minutes,
        settings,
        sweep_settings.cells_per_block,
        BalancedOrder.after(earlier),
    ).items():
        new += submit(store, request, jobs, settings, array_size, folder, code)
        num_runs = sum(len(block.entries) for job in jobs for block in job.blocks)
        console.print(
            f"{request.name}: {count(num_runs, 'run')} in {count(len(jobs), 'job')} of "
            f"{count(request.nodes, 'node')}, "
            f"about {max(job.minutes for job in jobs):.0f} min each, limit {request.minutes} min: "
            f"array {', '.join(array.slurm_id for array in new[-(-len(jobs) // -array_size) :])}",
            highlight=False,
        )
    if new:
        console.print(f"Submitted in {time.monotonic() - begin:.1f} s.", highlight=False)
    return [*{array.folder: array for array in live}.values(), *new]


def _announce(
    store: Store,
    plan: SweepPlan,
    found: ResumeState,
    pending: int,
    console: Console,
) -> None:
    print_notices(found, plan, store, f"`vitsweep retry {store.name}` runs them again", console)
    if pending:
        console.print(
            f"{count(pending, 'run')} {'is' if pending == 1 else 'are'} in live jobs of this sweep already.",
            highlight=False,
        )
    if not (found.missing_blocks or pending or found.not_measured) and plan.runnable:
        console.print("Everything that was asked for is measured already.")


def _next_commands(store: Store) -> str:
    """Return what to type to see, collect or end a submitted sweep."""
    name = sweep_argument(store)
    return (
        f"`vitsweep status {name} --watch` shows the sweep, `vitsweep collect {name}` makes its "
        f"tables, `vitsweep cancel {name}` ends its jobs."
    )


def require_waiting(settings: SlurmSettings) -> None:
    """Refuse to return before the cells have run, to a sweeper that learns from their results.

    Raises:
        BadValueError: `wait` is false.
    """
    if not settings.wait:
        raise BadValueError(
            "`hydra.launcher.wait=false`: this sweeper needs the result of every cell; leave it true."
        )
