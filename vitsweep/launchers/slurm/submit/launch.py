"""The Slurm launcher: freezes cells, groups them by requested resources, submits job arrays."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from vitsweep import extras
from vitsweep.errors import BadValueError, VitsweepError
from vitsweep.launchers.base import (
    LaunchRequest,
    LaunchResult,
    PreparedSweep,
    announce,
    announce_undecided,
    expected_minutes,
    prepared,
    rounds_of,
)
from vitsweep.launchers.slurm.commands import max_array_size, require_slurm
from vitsweep.launchers.slurm.state.jobs import JobArray
from vitsweep.launchers.slurm.state.poll import pending_runs, reconcile, wait_for_records
from vitsweep.launchers.slurm.state.status import watch
from vitsweep.launchers.slurm.submit.sbatch import (
    PlannedJob,
    pack,
    run_minutes,
    submit,
    without_unpaired_baselines,
)
from vitsweep.launchers.slurm.submit.settings import Request, SlurmSettings, groups
from vitsweep.planning.blocks import BalancedOrder, Block, look_blocks
from vitsweep.planning.freeze import code_folder
from vitsweep.planning.rounds import Rounds
from vitsweep.planning.sweep_plan import PlannedCell, SweepPlan
from vitsweep.results import sweeps
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.results.sweeps import sweep_argument
from vitsweep.tables.formatting import count

BLOCKS_AT_ONCE = 4
"""Jobs of a round of a race at least: they run side by side, where nodes are free."""
MOST_ROUNDS_WITHOUT_A_RUN = 3


def check_rounds(settings: SlurmSettings, typed: str) -> None:
    """Refuse what rounds on a cluster cannot do.

    Args:
        settings: of the launcher.
        typed: asks for the rounds: `sweep.search=race`, `sweep.limit`, or `sweep.minutes=M` of a grid.

    Raises:
        BadValueError: the command would not wait for its rounds.
    """
    if not settings.wait:
        raise BadValueError(
            f"`hydra.launcher.wait=false`: each round of `{typed}` is chosen from the runs of the "
            "rounds before, so that the command waits for them. Run it under `tmux` or `nohup`: Ctrl-C "
            "detaches from the jobs, and the same command continues."
        )


def only_request(entries: Sequence[PlannedCell], settings: SlurmSettings, typed: str) -> Request:
    """Return what cells that are compared ask of a job; `typed` asks for the comparison.

    Raises:
        BadValueError: they ask for different nodes or devices, which no block can hold.
    """
    requests = list(groups(entries, settings))
    if len(requests) > 1:
        names = ", ".join(request.name for request in requests)
        raise BadValueError(
            f"`{typed}` compares cells within one job, and these ask for different resources "
            f"({names}, nodes x ranks): measure each `resources.*` by itself, in a sweep of its own."
        )
    return requests[0]


@contextmanager
def launch(request: LaunchRequest, settings: SlurmSettings) -> Iterator[LaunchResult]:
    """Submit the missing runs of the cells, and wait until they have run.

    A race, and a grid with `sweep.minutes`, are submitted round after round.

    With `hydra.launcher.wait=false` the result is `submitted` as soon as Slurm has the jobs. Ctrl-C
    detaches: the jobs continue. The sweep is locked while jobs are submitted, and while the result is
    summarized, not while the jobs run.

    Raises:
        VitsweepError: a value is wrong, Slurm refuses, rounds of jobs end without a single run, or
            another command runs rounds in the sweep.
    """
    with ExitStack() as held:
        search, minutes = request.settings.search, request.settings.minutes
        typed = f"sweep.minutes={minutes:g}" if minutes else ""
        if typed := f"sweep.search={search}" if search in extras.ROUNDS else typed:
            check_rounds(settings, typed)
        require_slurm()
        console = request.console
        with prepared(request) as sweep:
            if typed:
                held.enter_context(sweeps.only_rounds(sweep.store))
            submission = (_RoundSubmission if typed else _GridSubmission)(
                sweep, request, settings, typed
            )
            arrays = submission.next()
        store, plan = sweep.store, sweep.plan
        if not settings.wait:
            console.print(_next_commands(store))
            yield LaunchResult(store=store, plan=plan, submitted=True)
            return
        while arrays:
            if not watch(store, plan, arrays, console):
                again = ", and the same command goes on" if typed else ""
                detached = f"Detached; the jobs continue{again}. {_next_commands(store)}"
                console.print(detached)
                yield LaunchResult(store=store, plan=plan, interrupted=True, submitted=True)
                return
            with sweeps.held(store, console):
                arrays = submission.next()
        submission.announce_end()
        with sweeps.held(store, console):
            yield LaunchResult(store=store, plan=plan)


class _Submission:
    """Submits the blocks of a command to Slurm, whose sweep it holds while it does so.

    Args:
        sweep: its store and cells.
        request: what the command wants.
        settings: of the launcher.
        typed: asks for rounds; "" where all is submitted at once.
    """

    def __init__(
        self, sweep: PreparedSweep, request: LaunchRequest, settings: SlurmSettings, typed: str
    ) -> None:
        self._sweep, self._settings, self._typed = sweep, settings, typed
        self._sweep_settings, self._console = request.settings, request.console
        self._job_states = reconcile(sweep.store)
        wait_for_records(sweep.store, self._job_states, self._console)
        self._pending = pending_runs(self._job_states)
        self._folder = code_folder(sweep.store, snapshot=request.settings.snapshot_code)
        self._array_size = max_array_size(settings)

    def live_arrays(self) -> list[JobArray]:
        """Return the arrays that an earlier command left running, if with cells of this plan."""
        planned = {run.cell_id for run in self._pending} & self._sweep.plan.entries.keys()
        live = [state.job.array for state in self._job_states if state.is_live and planned]
        return list({array.folder: array for array in live}.values())

    def announce_end(self) -> None:
        """Say what is left undecided."""

    def submit(self, resources: Request, jobs: Sequence[PlannedJob]) -> list[JobArray]:
        """Submit jobs that ask for the same resources."""
        sweep, size, settings = self._sweep, self._array_size, self._settings
        return submit(sweep.store, resources, jobs, settings, size, self._folder, sweep.code)


class _GridSubmission(_Submission):
    """Submits all missing runs at once."""

    _is_done = False

    def next(self) -> list[JobArray]:
        """Submit the runs that neither the store nor a live job has; return all live arrays, once."""
        if self._is_done:
            return []
        self._is_done, new = True, list[JobArray]()
        for resources, jobs in self._pack().items():
            arrays = self.submit(resources, jobs)
            new += arrays
            num_runs = sum(len(block.entries) for job in jobs for block in job.blocks)
            self._console.print(
                f"{resources.name}: {count(num_runs, 'run')} in {count(len(jobs), 'job')} of "
                f"{count(resources.nodes, 'node')}, "
                f"about {max(job.minutes for job in jobs):.0f} min each, limit {resources.minutes} min: "
                f"array {', '.join(array.slurm_id for array in arrays)}",
            )
        return [*self.live_arrays(), *new]

    def _pack(self) -> dict[Request, list[PlannedJob]]:
        """Return the jobs that do the missing runs."""
        settings, sweep_settings, plan = self._settings, self._sweep_settings, self._sweep.plan
        paired = replace(self._sweep, plan=without_unpaired_baselines(plan, settings))
        awaited = [(run.cell_id, run.block) for run in self._pending if not run.is_look]
        rounds = rounds_of(paired, sweep_settings, BLOCKS_AT_ONCE, awaited)
        state = rounds.state(())
        announce(rounds, state, self._sweep, self._console)
        if num := len(awaited):
            are = "is" if num == 1 else "are"
            self._console.print(f"{count(num, 'run')} {are} in live jobs of this sweep already.")
        lacking = [plan.entries[cell_id] for cell_id in state.missing_blocks]
        expected = expected_minutes(lacking, self._sweep.store)
        minutes = run_minutes(plan, rounds.earlier, expected, settings.minutes_per_run)
        size, order = sweep_settings.cells_per_block, BalancedOrder.after(rounds.earlier)
        most = sweep_settings.prune_slowdown

        def looks(of_job: SweepPlan, missing: Mapping[str, int]) -> Iterable[Block]:
            return look_blocks(of_job, replace(state, missing_blocks={**missing}), sweep_settings)

        missing = state.missing_blocks
        return pack(plan, missing, minutes, settings, size, order, looks, most, state.first)


class _RoundSubmission(_Submission):
    """Submits round after round: a block per job, each round chosen from those before."""

    _rounds: Rounds | None = None
    _records: Sequence[RunRecord] = ()
    _num_records, _rounds_without_progress = -1, 0

    def next(self) -> list[JobArray]:
        """Submit the next round; before the first, return what an earlier command left running.

        Raises:
            BadValueError: the race cannot begin, or cells of a block ask for different resources.
            VitsweepError: Slurm refuses, or rounds ended without a single run.
        """
        store, settings = self._sweep.store, self._settings
        if self._rounds is None:
            if live := self.live_arrays():  # wait for it first
                self._job_states = []
                return live
            if self._sweep_settings.search in extras.ROUNDS:  # it compares all of them
                only_request(self._sweep.plan.runnable, settings, self._typed)
            self._rounds = rounds_of(self._sweep, self._sweep_settings, BLOCKS_AT_ONCE)
            announce(self._rounds, self._rounds.state(()), self._sweep, self._console)
        known = {run.run_id for run in self._rounds.earlier}
        self._records = [run for run in store.runs() if run.run_id not in known]
        self._require_progress(len(self._records))
        blocks = self._rounds.next(self._records)
        if not blocks:
            return []
        jobs: dict[Request, list[PlannedJob]] = {}
        for block in blocks:
            resources = only_request(block.entries, settings, self._typed)
            minutes = settings.minutes_per_run * len(block.entries)
            job = PlannedJob((block,), minutes, any_look=self._rounds.is_bounded)
            jobs.setdefault(resources, []).append(job)
        arrays = [array for of_one in jobs.items() for array in self.submit(*of_one)]
        runs = sum(len(block.entries) for block in blocks)
        self._console.print(
            f"Round of {count(len(blocks), 'block')}, "
            f"{count(runs, 'look' if blocks[0].is_look else 'run')}: array "
            f"{', '.join(array.slurm_id for array in arrays)}",
        )
        return arrays

    def announce_end(self) -> None:
        """Say what is left undecided."""
        if self._rounds:
            announce_undecided(self._rounds, self._records, self._sweep_settings, self._console)

    def _require_progress(self, num_records: int) -> None:
        has_grown = num_records > self._num_records
        self._rounds_without_progress = 0 if has_grown else self._rounds_without_progress + 1
        self._num_records = num_records
        if self._rounds_without_progress >= MOST_ROUNDS_WITHOUT_A_RUN:
            raise VitsweepError(
                f"{MOST_ROUNDS_WITHOUT_A_RUN} rounds of jobs ended without a run: `vitsweep status "
                f"{self._sweep.store.name}` says why. The same command goes on."
            )


def _next_commands(store: Store) -> str:
    """Return what to type to see, collect or end a submitted sweep."""
    name = sweep_argument(store)
    return (
        f"`vitsweep status {name} --watch` shows the sweep, `vitsweep collect {name}` makes its "
        f"tables, `vitsweep cancel {name}` ends its jobs."
    )
