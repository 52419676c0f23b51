"""The Slurm launcher: freezes cells, groups them by requested resources, submits job arrays."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.launchers.base import LaunchRequest, LaunchResult, PreparedSweep, locked, prepared
from vitsweep.launchers.slurm.commands import machine_of, max_array_size, require_slurm
from vitsweep.launchers.slurm.state.jobs import JobArray
from vitsweep.launchers.slurm.state.poll import pending_runs
from vitsweep.launchers.slurm.state.reconcile import reconcile
from vitsweep.launchers.slurm.state.watch import watch
from vitsweep.launchers.slurm.submit.packing import (
    PlannedJob,
    pack,
    run_minutes,
    without_unpaired_baselines,
)
from vitsweep.launchers.slurm.submit.sbatch import submit
from vitsweep.launchers.slurm.submit.settings import Request, SlurmSettings, groups
from vitsweep.planning.blocks import BalancedOrder
from vitsweep.planning.freeze import code_folder
from vitsweep.planning.pending import ResumeState, print_notices, resume_state
from vitsweep.planning.predictions import predict_before_submission, traced_throughput
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.racing.rounds import RaceRounds, describe_refused
from vitsweep.results.store import Store, sweep_argument
from vitsweep.tables.formatting import count

# A race on a cluster: every round is a job array with a block per job; the next waits for its end.


BLOCKS_AT_ONCE = 4
"""Jobs of a round at least: they run side by side, where nodes are free."""
MOST_ROUNDS_WITHOUT_A_RUN = 3


def check_race(settings: SlurmSettings) -> None:
    """Refuse what a race on a cluster cannot do.

    Raises:
        BadValueError: the command would not wait for its rounds, or baselines run in other jobs.
    """
    if not settings.wait:
        raise BadValueError(
            "`hydra.launcher.wait=false`: each round of `sweep.search=race` is chosen from the runs of the "
            "rounds before, so that the command waits for them. Run it under `tmux` or `nohup`: Ctrl-C "
            "detaches from the jobs, and the same command continues."
        )
    if not settings.pair:
        raise BadValueError(
            "`hydra.launcher.pair=false` does not go with `sweep.search=race`, which compares within blocks."
        )


def run_race(sweep: PreparedSweep, request: LaunchRequest, settings: SlurmSettings) -> bool:
    """Submit rounds and wait for each until the race has ended; False where the user detached.

    Raises:
        BadValueError: the race cannot begin.
        VitsweepError: Slurm refuses, or jobs end without a single run.
    """
    store, plan, console = sweep.store, sweep.plan, request.console
    live = _live_arrays(sweep)
    if live and not watch(store, plan, live, console):
        return False
    reconcile(store)
    earlier = list(store.runs())
    rounds = RaceRounds(
        plan,
        request.settings,
        store,
        sweep.code,
        earlier,
        at_once=BLOCKS_AT_ONCE,
        predicted=traced_throughput(plan),
    )
    rounds.check()
    resources = only_request(plan, settings)
    if refused := describe_refused(plan):
        console.print(refused, highlight=False)
    state = rounds.state(())
    print_notices(state, plan, store, f"`vitsweep retry {store.name}` runs them again", console)
    known, fruitless = {run.run_id for run in earlier}, 0
    folder = code_folder(store, snapshot=request.settings.snapshot_code)
    while True:
        records = [run for run in store.runs() if run.run_id not in known]
        with locked(store, console):
            blocks = rounds.next(records)
            if not blocks:
                return True
            minutes = settings.minutes_per_run
            jobs = [PlannedJob((block,), minutes * len(block.entries)) for block in blocks]
            size = max_array_size(settings)
            arrays = submit(store, resources, jobs, settings, size, folder, sweep.code)
        runs = sum(len(block.entries) for block in blocks)
        console.print(
            f"Round of {count(len(jobs), 'block')}, {count(runs, 'run')}: array "
            f"{', '.join(array.slurm_id for array in arrays)}",
            highlight=False,
        )
        if not watch(store, plan, arrays, console):
            return False
        grown = sum(1 for run in store.runs() if run.run_id not in known) > len(records)
        fruitless = 0 if grown else fruitless + 1
        if fruitless >= MOST_ROUNDS_WITHOUT_A_RUN:
            raise VitsweepError(
                f"{MOST_ROUNDS_WITHOUT_A_RUN} rounds of jobs ended without a run: `vitsweep status "
                f"{store.name}` says why. The same command continues the race."
            )


def _live_arrays(sweep: PreparedSweep) -> list[JobArray]:
    """Return the arrays that an earlier command left running, of cells of this plan."""
    states = reconcile(sweep.store)
    planned = {run.cell_id for run in pending_runs(states)} & sweep.plan.entries.keys()
    live = [state.job.array for state in states if state.is_live and planned]
    return list({array.folder: array for array in live}.values())


def only_request(plan: SweepPlan, settings: SlurmSettings) -> Request:
    """Return what all cells ask of a job.

    Raises:
        BadValueError: they ask for different nodes or devices, which no block can hold.
    """
    requests = list(groups(plan.runnable, settings))
    if len(requests) > 1:
        names = ", ".join(request.name for request in requests)
        raise BadValueError(
            "`sweep.search=race` compares cells within one job, and these ask for different resources "
            f"({names}, nodes x ranks): race each `resources.*` by itself, in a sweep of its own."
        )
    return requests[0]


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
