"""A race on a cluster: every round is a job array with a block per job; the next waits for its end."""

from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.launchers.base import LaunchRequest, PreparedSweep, locked
from vitsweep.launchers.slurm.state.job_files import JobArray
from vitsweep.launchers.slurm.state.poll import pending_runs
from vitsweep.launchers.slurm.state.reconcile import reconcile
from vitsweep.launchers.slurm.state.watch import watch
from vitsweep.launchers.slurm.submit.cluster import max_array_size
from vitsweep.launchers.slurm.submit.job_request import Request, groups
from vitsweep.launchers.slurm.submit.packing import PlannedJob
from vitsweep.launchers.slurm.submit.sbatch import submit
from vitsweep.launchers.slurm.submit.slurm_settings import SlurmSettings
from vitsweep.planning.notices import print_notices
from vitsweep.planning.prediction_before_run import traced_throughput
from vitsweep.planning.provenance import code_folder
from vitsweep.planning.race_plan import describe_refused
from vitsweep.planning.race_rounds import RaceRounds
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.tables.formatting import count

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
