"""The Slurm launcher: freezes cells, groups them by requested resources, submits job arrays."""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console

from vitsweep.cli.summary import INTERRUPTED, Ending, finish
from vitsweep.composition.composed_cell import ComposedCell
from vitsweep.composition.composer import Composer
from vitsweep.composition.sweep_settings import SweepSettings, sweep_settings
from vitsweep.console import open_console
from vitsweep.errors import BadValueError
from vitsweep.launchers.slurm.state.job_files import JobArray
from vitsweep.launchers.slurm.state.poll import pending_runs
from vitsweep.launchers.slurm.state.reconcile import reconcile
from vitsweep.launchers.slurm.state.slurm_cli import require_slurm
from vitsweep.launchers.slurm.state.watch import watch
from vitsweep.launchers.slurm.submit.cluster import machine_of, max_array_size
from vitsweep.launchers.slurm.submit.packing import pack
from vitsweep.launchers.slurm.submit.sbatch import submit
from vitsweep.launchers.slurm.submit.slurm_settings import SlurmSettings, settings_of
from vitsweep.planning.freeze import freeze, open_store, plan_of
from vitsweep.planning.pending import ResumeState, announce, known
from vitsweep.planning.provenance import code_folder, code_state
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.record import Status
from vitsweep.results.store import Store


def launch(
    asked: Sequence[ComposedCell],
    config: dict[str, Any],
    fields: dict[str, Any],
    composer: Composer,
    ending: Ending = finish,
) -> list[Mapping[str, Any]]:
    """Submit what is missing of the cells; return the row of each, in the order asked for.

    With `hydra.launcher.wait=false` it returns as soon as Slurm has the jobs, with a row per cell
    that says so. Otherwise `ending` does with the rows what is to be done at the end.

    Raises:
        VitsweepError: a value is wrong, or Slurm refuses.
        SystemExit: 130 after Ctrl-C, which detaches; 3 where cells ended otherwise.
    """
    console, settings = open_console(), settings_of(fields)
    sweep = sweep_settings(config)
    require_slurm()
    plan = plan_of(asked, machine_of(settings), composer)
    store = open_store(sweep)

    def told() -> None:
        console.print(f"Another command is at work in `{store.root}`; waiting for it to end.")

    with store.lock(on_wait=told):
        watched = _submit_missing(store, plan, sweep, settings, console)
    if not settings.wait:
        console.print(_come_back(store), highlight=False)
        return [{"cell_id": e.cell_id, "status": "submitted"} for e in plan.entries.values()]
    if not watch(store, plan, watched, console):
        console.print(f"Detached; the jobs go on. {_come_back(store)}", highlight=False)
        raise SystemExit(INTERRUPTED)
    return ending(store, plan, console, False, config.get("tracker"))


def _submit_missing(
    store: Store,
    plan: SweepPlan,
    sweep: SweepSettings,
    settings: SlurmSettings,
    console: Console,
) -> list[JobArray]:
    """Freeze, then submit the runs that neither the store nor a live job has; return all live arrays."""
    begin, code = time.monotonic(), code_state()
    job_states = reconcile(store)
    freeze(store, plan, sweep, code)
    found, minutes = _known(store, plan, sweep, code, settings)
    pending = pending_runs(job_states)
    missing = {cell: n - pending[cell] for cell, n in found.missing.items() if n > pending[cell]}
    planned = pending.keys() & plan.entries.keys()
    live = [state.job.array for state in job_states if state.is_live and planned]
    _announce(store, plan, found, missing, sum(pending.values()), console)
    folder = code_folder(store, code, snapshot=sweep.snapshot_code)
    size, new = max_array_size(settings), []
    for request, jobs in pack(plan, missing, minutes, settings, sweep.cells_per_block).items():
        new += submit(store, request, jobs, settings, size, folder)
        runs = sum(len(block.entries) for job in jobs for block in job.blocks)
        console.print(
            f"{request.name}: {runs} runs in {len(jobs)} jobs of {request.nodes} nodes, "
            f"about {max(job.minutes for job in jobs):.0f} min each, limit {request.minutes} min: "
            f"array {', '.join(array.slurm_id for array in new[-(-len(jobs) // -size) :])}",
            highlight=False,
        )
    if new:
        console.print(f"Submitted in {time.monotonic() - begin:.1f} s.", highlight=False)
    return [*{array.folder: array for array in live}.values(), *new]


def _known(
    store: Store,
    plan: SweepPlan,
    sweep: SweepSettings,
    code: dict[str, Any],
    settings: SlurmSettings,
) -> tuple[ResumeState, dict[str, float]]:
    """Return what is measured, and the expected minutes of a run of each cell."""
    runs = list(store.runs())
    found = known(plan, runs, sweep, code)
    took: dict[str, list[float]] = {}
    for run in runs:
        if run.status == Status.measured and "run_seconds" in run.environment:
            took.setdefault(run.cell_id, []).append(run.environment["run_seconds"] / 60)
    every = [minutes for of_cell in took.values() for minutes in of_cell]
    usual = median(every) if every else settings.minutes_per_run
    return found, {c: median(took[c]) if c in took else usual for c in plan.entries}


def _announce(
    store: Store,
    plan: SweepPlan,
    found: ResumeState,
    missing: Mapping[str, int],
    pending: int,
    console: Console,
) -> None:
    announce(found, f"`vitsweep retry {store.name}` runs them again", console)
    if pending:
        console.print(f"{pending} runs are in live jobs of this sweep already.", highlight=False)
    if not missing and not pending and plan.runnable:
        console.print("Everything that was asked for is measured already.")


def _come_back(store: Store) -> str:
    name = store.name if store.root.parent.name == "results" else str(store.root)
    return (
        f"`vitsweep status {name} --watch` shows the sweep, `vitsweep collect {name}` makes its "
        f"tables, `vitsweep cancel {name}` ends its jobs."
    )


def checked_for_waiting(fields: Mapping[str, Any]) -> None:
    """Sweepers that learn from results cannot leave before there are any.

    Raises:
        BadValueError: `wait` is false.
    """
    if not fields.get("wait", True):
        raise BadValueError(
            "`hydra.launcher.wait=false`: this sweeper needs the result of every cell; leave it true."
        )
