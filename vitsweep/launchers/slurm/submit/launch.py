"""The Slurm launcher: freezes cells, groups them by requested resources, submits job arrays."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from vitsweep.composition.hydra import value_override
from vitsweep.composition.sweep_settings import SweepSettings
from vitsweep.launchers.base import (
    LaunchRequest,
    LaunchResult,
    PreparedSweep,
    announce,
    expected_minutes,
    prepared,
    rounds_of,
)
from vitsweep.launchers.slurm.commands import require_slurm
from vitsweep.launchers.slurm.state.jobs import JobArray
from vitsweep.launchers.slurm.state.poll import JobState, pending_runs, reconcile, wait_for_records
from vitsweep.launchers.slurm.state.status import watch
from vitsweep.launchers.slurm.submit.sbatch import (
    PlannedJob,
    pack,
    paired,
    run_minutes,
    submit,
)
from vitsweep.launchers.slurm.submit.settings import Request, SlurmSettings
from vitsweep.planning.blocks import BalancedOrder
from vitsweep.planning.freeze import code_folder
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results import sweeps
from vitsweep.results.store import Store
from vitsweep.results.sweeps import sweep_argument
from vitsweep.tables.formatting import count


@contextmanager
def launch(request: LaunchRequest, settings: SlurmSettings) -> Iterator[LaunchResult]:
    """Submit the missing runs of the cells, and wait until they have run.

    With `hydra.launcher.wait=false` the result is `submitted` as soon as Slurm has the jobs; where none is
    needed or live, it is that of the records. Ctrl-C detaches: the jobs continue. The sweep is locked while
    jobs are submitted, and while the result is summarized, not while the jobs run.

    Raises:
        VitsweepError: a value is wrong, or Slurm refuses.
    """
    require_slurm()
    console = request.console
    with prepared(request) as sweep:
        arrays = _submit_missing(sweep, request, settings)
    store, plan = sweep.store, sweep.plan
    if arrays and not settings.wait:
        console.print(_next_commands(store))
        yield LaunchResult(store=store, plan=plan, submitted=True)
        return
    if arrays and not watch(store, plan, arrays, console):
        console.print(f"Detached; the jobs continue. {_next_commands(store)}")
        yield LaunchResult(store=store, plan=plan, interrupted=True, submitted=True)
        return
    with sweeps.held(store, console):
        yield LaunchResult(store=store, plan=plan)


def _submit_missing(
    sweep: PreparedSweep, request: LaunchRequest, settings: SlurmSettings
) -> list[JobArray]:
    """Submit the runs that neither the store nor a live job has.

    Returns:
        All live arrays: the new ones, after those of earlier commands where they run cells of this plan.
    """
    store, console = sweep.store, request.console
    job_states = reconcile(store)
    wait_for_records(store, job_states, console)
    pending = pending_runs(job_states)
    folder = code_folder(store, snapshot=request.settings.snapshot_code)
    is_awaited = {run.cell_id for run in pending} & sweep.plan.entries.keys()
    arrays = {s.job.array.folder: s.job.array for s in job_states if s.is_live and is_awaited}
    if said := typed_otherwise(job_states, sweep.plan, store):
        console.print(said)
    awaited = [(run.cell_id, run.block) for run in pending]
    for resources, jobs in _packed(sweep, request, settings, awaited).items():
        new = submit(store, resources, jobs, settings, folder, sweep.code)
        arrays[new.folder] = new
        num_runs = sum(len(block.entries) for job in jobs for block in job.blocks)
        console.print(
            f"{resources.name}: {count(num_runs, 'run')} in {count(len(jobs), 'job')} of "
            f"{count(resources.nodes, 'node')}, per job "
            f"about {max(job.minutes for job in jobs):.0f} min, limit {resources.minutes} min: "
            f"array {new.slurm_id}",
        )
    return [*arrays.values()]


def _packed(
    sweep: PreparedSweep,
    request: LaunchRequest,
    settings: SlurmSettings,
    awaited: Sequence[tuple[str, str]],
) -> dict[Request, list[PlannedJob]]:
    """Return the jobs that do the missing runs; `awaited` are (cell id, block) of those in live jobs."""
    asked: SweepSettings = request.settings
    plan, console = sweep.plan, request.console
    rounds = rounds_of(replace(sweep, plan=paired(plan, settings)), asked, awaited)
    state = rounds.state(())
    announce(rounds, state, sweep, console)
    if num := len(awaited):
        are = "is" if num == 1 else "are"
        console.print(f"{count(num, 'run')} {are} in live jobs of this sweep already.")
    lacking = [plan.entries[cell_id] for cell_id in state.missing_blocks]
    expected = expected_minutes(lacking, sweep.store, request.machine)
    minutes, known = run_minutes(plan, rounds.earlier, expected, settings.minutes_per_run)
    size, order = asked.cells_per_block, BalancedOrder.after(rounds.earlier)
    return pack(plan, state.missing_blocks, minutes, known, settings, size, order)


def typed_otherwise(job_states: Sequence[JobState], plan: SweepPlan, store: Store) -> str:
    """Name settings of earlier commands with which live jobs run cells of this one; "" without any."""
    cells, settings = set[str](), dict[str, None]()
    for state in filter(lambda state: state.is_live, job_states):
        for cell_id in {run.cell_id for run in state.remaining_runs} & plan.entries.keys():
            typed = json.loads(json.dumps(plan.entries[cell_id].spec.of_command))
            for group, part in state.job.of_command(cell_id).items():
                for name, value in part.items():
                    is_asked = group != "resources" and name != "blocks"  # facts; further jobs
                    if is_asked and typed.get(group, {}).get(name, value) != value:
                        cells.add(cell_id)
                        settings[f"`{value_override(f'{group}.{name}', value)}`"] = None
    if not cells:
        return ""
    return (
        f"Live jobs run {count(len(cells), 'cell')} with {', '.join(settings)}, which an earlier command "
        f"typed: to have them as typed now, `vitsweep cancel {sweep_argument(store)}` first."
    )


def _next_commands(store: Store) -> str:
    """Return what to type to see, collect or end a submitted sweep."""
    name = sweep_argument(store)
    return (
        f"`vitsweep status {name} --watch` shows the sweep, `vitsweep collect {name}` makes its "
        f"tables, `vitsweep cancel {name}` ends its jobs."
    )
