"""What `vitsweep status` shows: jobs, the number of cells by status, and why cells have no result."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pandas import DataFrame
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from vitsweep.errors import VitsweepError
from vitsweep.execution.attempts import KILLED, is_alive, unfinished
from vitsweep.files import SweepGoneError
from vitsweep.launchers.slurm.commands import scancel
from vitsweep.launchers.slurm.state.jobs import ArrayJob, JobArray
from vitsweep.launchers.slurm.state.poll import (
    REFRESH_SECONDS,
    JobState,
    pending_runs,
    poll,
    reconcile,
    reconcile_hint,
    states_over_time,
    wait_for_records,
)
from vitsweep.results.provenance import is_own, plain_text
from vitsweep.results.record import CHOOSING, SCREENING, STOPPED_FROM_OUTSIDE, Status
from vitsweep.results.store import Store
from vitsweep.tables.formatting import count
from vitsweep.tables.load import cells_of
from vitsweep.tables.names import names_by_id
from vitsweep.tables.notes import lines_of
from vitsweep.tables.render import TextTable
from vitsweep.tables.valid_runs import final_status

if TYPE_CHECKING:
    from vitsweep.launchers.progress import Progress
    from vitsweep.planning.sweep_plan import SweepPlan

WAITING, RUNNING = "waiting", "running"
BLOCKS = "measurement.blocks"
MOST_LINES = 100
"""Reasons that are shown."""


@dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    Attributes:
        status: of the record, or `waiting` or `running`.
        reason: why it was not measured.
        spec: the flattened spec, where a run or a refusal tells it.
        lacking: blocks that a measured cell lacks of those that the latest command for it asked for; where
            that may do with fewer, its runs that were stopped from outside.
    """

    status: str
    reason: str = ""
    spec: Mapping[str, Any] = field(default_factory=dict)
    lacking: int = 0


def page(
    store: Store, job_states: Sequence[JobState], outcomes: Mapping[str, Outcome]
) -> RenderableType:
    """Return a table of the job arrays, the number of cells by status, and why cells have no result."""
    counts = Counter(outcome.status.replace("_", " ") for outcome in outcomes.values())
    cells = " · ".join(f"{name} {count}" for name, count in counts.most_common())
    names = names_by_id(cells_of(store)) if _cells_in_flight(job_states) else {}
    parts: list[RenderableType] = [_arrays_table(job_states, names)] if job_states else []
    parts.append(Text(f"Cells of {store.name}: {cells}"))
    if any(state.state == "unknown" for state in job_states):
        clusters = {s.job.array.facts.get("cluster", "") for s in job_states} - {""}
        where = f" for cluster {', '.join(sorted(clusters))}" if clusters else ""
        parts.append(
            Text(
                f"Slurm does not answer{where}, or hides its jobs from this user: their state is as "
                "they last wrote it."
            )
        )
    parts += [Text(f"  {line}") for line in _without_result(outcomes)]
    hints = (
        continue_hint(store, job_states, outcomes),
        reconcile_hint(store, job_states),
    )
    return Group(*parts, *(Text(hint) for hint in hints if hint))


def outcomes_of(store: Store, job_states: Sequence[JobState]) -> dict[str, Outcome]:
    """Return cell id -> what became of it over all its runs.

    A cell that is not measured and that a live job will still run is waiting or running, whatever became of
    an earlier job.
    """

    of_record = "cell_id status reason failed_rank attempt block purpose".split()
    runs, specs = [], dict[str, dict[str, Any]]()
    for record in store.runs():
        begin, speed = record.environment.get("started_at"), record.metrics.get("images_per_second")
        own = (getattr(record, name) for name in of_record)
        runs.append((*own, begin, speed or 0.0, record.spec.get(BLOCKS) or 0))
        specs[record.cell_id] = record.spec
    coming = {run.cell_id for run in pending_runs(job_states)}
    running = set(_cells_in_flight(job_states))
    outcomes: dict[str, Outcome] = {}
    if runs:
        table = DataFrame(runs, columns=[*of_record, "started_at", "speed", BLOCKS])
        lacking = _lacking(store, table)
        for row in final_status(table).to_dict("records"):
            cell_id, status = row["cell_id"], str(row["status"])
            if status != Status.measured and cell_id in coming:
                status, row["reason"] = (RUNNING if cell_id in running else WAITING), ""
            more = lacking.get(cell_id, 0) if status == Status.measured else 0
            outcomes[cell_id] = Outcome(status, str(row["reason"]), specs[cell_id], more)
    for cell_id in store.cells_without_runs():
        if cell_id in coming:
            outcomes[cell_id] = Outcome(RUNNING if cell_id in running else WAITING)
        elif damaged := store.damaged_row(cell_id):
            outcomes[cell_id] = Outcome(damaged["status"], damaged["reason"])
        elif kept := store.kept_row(cell_id):
            status = str(kept.get("status") or WAITING)
            outcomes[cell_id] = Outcome(status, str(kept.get("reason") or ""), kept)
        else:
            outcomes[cell_id] = _last_unfinished(store, cell_id)
    return outcomes


def _lacking(store: Store, runs: DataFrame) -> dict[str, int]:
    """Return measured cell -> blocks that it lacks of those that the latest command for it asked for.

    Races, searches and `sweep.minutes` may do with fewer: of these it is the runs that were stopped from
    outside. Cells that are so slow that they are pruned lack none, nor do baselines of such cells alone.

    Args:
        store: its commands.
        runs: of all cells.
    """
    commands = {cell: entry for entry in store.commands() for cell in entry.get("cells", ())}
    most = "prune_slowdown"
    slowest = {cell: e[most] or inf for cell, e in commands.items() if most in e}
    good = runs[runs["status"] == Status.measured].sort_values("started_at")
    speed: dict[Any, float] = good.set_index(["cell_id", "block"])["speed"].to_dict()
    baselines = store.baselines()
    pruned = {
        cell
        for (cell, block), own in speed.items()
        if own * slowest.get(cell, inf) < speed.get((baselines.get(cell), block), 0.0)
    }
    used = {baseline for cell, baseline in baselines.items() if cell not in {*pruned, baseline}}
    done = pruned | ({baselines[cell] for cell in pruned} - used)
    counted = good[~good["purpose"].isin((SCREENING, CHOOSING))]
    blocks = counted.groupby("cell_id")["block"].nunique()
    lacking = good.groupby("cell_id")[BLOCKS].last().sub(blocks, fill_value=0)
    stopped = Counter(runs["cell_id"][runs["status"].isin(STOPPED_FROM_OUTSIDE)])
    short = {str(cell): int(n) for cell, n in lacking.items() if n > 0 and cell not in done}
    return {cell: n if cell in slowest else stopped[cell] for cell, n in short.items()}


def _last_unfinished(store: Store, cell_id: str) -> Outcome:
    """Return what became of a cell without a record: its last run may have started on this machine."""
    for run in unfinished(store, cell_id)[-1:]:
        return Outcome(RUNNING) if is_alive(store, run) else Outcome(Status.killed, KILLED)
    return Outcome(WAITING)


def _arrays_table(job_states: Sequence[JobState], names: Mapping[str, str]) -> RenderableType:
    by_array: dict[JobArray, list[JobState]] = {}
    for state in job_states:
        by_array.setdefault(state.job.array, []).append(state)
    rows = [_array_row(array, members, names) for array, members in by_array.items()]
    return TextTable(DataFrame(rows), "Jobs")


def _array_row(
    array: JobArray, members: Sequence[JobState], names: Mapping[str, str]
) -> dict[str, str]:
    counts = Counter(state.state for state in members)
    num_runs = sum(len(state.job.runs()) for state in members)
    num_remaining = sum(len(state.remaining_runs) for state in members)
    request = array.facts["request"]
    # why jobs wait, and up to three of the cells that run
    reasons = {s.slurm.reason for s in members if s.state == "waiting" and s.slurm}
    cells = [names.get(cell_id, cell_id) for cell_id in _cells_in_flight(members)[:3]]
    return {
        "array": array.slurm_id or "?",
        "nodes x ranks": f"{request['nodes']} x {request['ranks_per_node']}",
        "waiting": str(counts["waiting"]),
        "running": str(counts["running"] + counts["unknown"]),
        "ended": str(counts["ended"] + counts["gone"]),
        "runs": f"{num_runs - num_remaining}/{num_runs}",
        "now": ", ".join([*map(_in_words, sorted(reasons - {"None", ""})), *cells]),
    }


def _in_words(reason: str) -> str:
    """Say what a reason of Slurm means that waiting does not end."""
    limit = "more nodes, time or memory than the partition allows, so that it never starts"
    return (
        f"{reason} ({limit})"
        if reason in ("PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit")
        else reason
    )


def _cells_in_flight(job_states: Sequence[JobState]) -> list[str]:
    """Return the cells that jobs are running; where Slurm does not answer, as they last wrote it."""
    return [
        state.events.in_flight["cell_id"]
        for state in job_states
        if state.state in ("running", "unknown") and state.events.in_flight
    ]


def _without_result(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield a line per status and reason of the cells that ended without a measurement."""
    going = (Status.measured, WAITING, RUNNING)
    if all(outcome.status in going for outcome in outcomes.values()):
        return

    known = [o for o in outcomes.values() if o.spec or o.status not in going]
    rows = DataFrame([dict(o.spec) | {"status": o.status, "reason": o.reason} for o in known])
    lines = lines_of(rows, ~rows["status"].isin(going))
    yield from lines[:MOST_LINES]
    if len(lines) > MOST_LINES:
        yield f"... and {len(lines) - MOST_LINES} more reasons: `vitsweep collect` shows all cells."


def is_busy(store: Store, job_states: Sequence[JobState], outcomes: Mapping[str, Outcome]) -> bool:
    """Whether something runs cells of the sweep: a job, or a command on this or another machine.

    A command holds the folder from its start on, long before its first run.
    """
    return (
        any(state.is_live for state in job_states)
        or any(outcome.status == RUNNING for outcome in outcomes.values())
        or store.is_locked()
    )


def continue_hint(
    store: Store, job_states: Sequence[JobState], outcomes: Mapping[str, Outcome]
) -> str:
    """Return what is missing that nothing will start by itself, and the command that measures it, or "".

    That of somebody else is named as theirs, not as one to type.
    """
    lacking = sum(outcome.lacking for outcome in outcomes.values())
    waiting = {cell_id for cell_id, o in outcomes.items() if o.status == WAITING or o.lacking}
    if any(state.is_live for state in job_states):
        return ""
    if is_busy(store, job_states, outcomes):
        return "A command is at work on this sweep: more is coming."
    runs = f"Missing: {count(lacking, 'run')} of measured cells.\n" * bool(lacking)
    for entry in reversed(store.commands()):
        if entry.get("command") and waiting & set(entry.get("cells", ())):
            if not is_own(entry):
                typed = plain_text(str(entry["command"]))
                return f"{runs}Somebody else (or a user whose key was lost) asked for them: {typed}"
            return f"{runs}The same command goes on with what is missing: {entry['command']}"
    return runs.strip()


# `vitsweep status` and `vitsweep cancel`: the jobs of a submitted sweep, from any terminal.


SECONDS_TO_CANCEL = 60.0
UNCONFIRMED = "Slurm does not say that these ids are jobs of this sweep (batch script)."
REFUSED = "access/permission denied"
"""What scancel prints about jobs of another user."""


def status(store: Store, watch: bool, console: Console) -> int:
    """Show the jobs and cells of a sweep.

    Args:
        store: of the sweep.
        watch: show them again and again until nothing runs any more.
        console: where to show them.

    Returns:
        0; 3 where nothing runs any more and not all cells were measured.
    """
    if not watch:
        job_states = poll(store)
        outcomes = outcomes_of(store, job_states)
        console.print(page(store, job_states, outcomes))
        return 0 if is_busy(store, job_states, outcomes) else _exit_code(outcomes)
    with Live(console=console, auto_refresh=False) as live:
        states = states_over_time(partial(poll, store))
        while True:
            job_states, start = next(states), time.monotonic()
            outcomes = outcomes_of(store, job_states)
            live.update(page(store, job_states, outcomes), refresh=True)
            if not is_busy(store, job_states, outcomes):
                return _exit_code(outcomes)
            # a large sweep takes seconds to read: at most a third of the time is spent on it
            time.sleep(max(REFRESH_SECONDS, 2 * (time.monotonic() - start)))


def _exit_code(outcomes: Mapping[str, Outcome]) -> int:
    return 0 if all(o.status == Status.measured for o in outcomes.values()) else 3


def cancel(store: Store, console: Console) -> int:
    """End the live jobs of a sweep; what was measured stays, the rest is recorded as killed.

    Returns:
        0.

    Raises:
        VitsweepError: Slurm does not answer, refuses, or jobs are still live after a minute.
    """
    live = [state for state in poll(store) if state.is_live]
    if any(state.state == "unknown" for state in live):
        raise VitsweepError("`squeue` does not answer: nothing was cancelled. Try again later.")
    if not live:
        console.print(f"No job of sweep {store.name} is waiting or running.")
        return 0
    ids = _ids_to_cancel([state.job for state in live if state.is_confirmed])
    errors = scancel(ids) if ids else UNCONFIRMED
    if ids and REFUSED not in errors.lower():
        _wait_until_gone(store, live)
    job_states = poll(store)
    left = _still_live(live, job_states)
    if len(left) < len(live):
        console.print(f"Cancelled {count(len(live) - len(left), 'job')}.")
    console.print(page(store, job_states, outcomes_of(store, job_states)))
    if left:
        named = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        why = errors or f"Slurm has not ended them within {SECONDS_TO_CANCEL:.0f} s."
        raise VitsweepError(
            f"Not cancelled: {count(len(left), 'job')} of sweep {store.name} ({named}). {why} Type the "
            "same command again, as the user who submitted them."
        )
    return 0


def _ids_to_cancel(live: Sequence[ArrayJob]) -> list[str]:
    """Name whole arrays where all their jobs are meant: of a part that waits Slurm forgets the index."""
    counts = Counter(job.array.slurm_id for job in live)
    whole = {
        job.array.slurm_id
        for job in live
        if counts[job.array.slurm_id] == job.array.facts["num_jobs"]
    }
    return [*whole, *(job.slurm_id for job in live if job.array.slurm_id not in whole)]


def _wait_until_gone(store: Store, cancelled: Sequence[JobState]) -> None:
    """Wait until Slurm has ended some jobs, for `SECONDS_TO_CANCEL` at most; record what they left."""
    deadline = time.monotonic() + SECONDS_TO_CANCEL
    while _still_live(cancelled, reconcile(store)) and time.monotonic() < deadline:
        time.sleep(0.5)


def _still_live(of: Sequence[JobState], now: Sequence[JobState]) -> list[str]:
    """Return the ids of those jobs that are live now."""
    ids = {state.job.slurm_id for state in of}
    return [s.job.slurm_id for s in now if s.is_live and s.job.slurm_id in ids]


def wait_for_jobs(store: Store, seconds: float | None = None) -> bool:
    """Wait until no job of a sweep is live; runs that dead jobs did not finish are recorded.

    Returns:
        False if jobs are still live after `seconds`.
    """
    deadline = inf if seconds is None else time.monotonic() + seconds
    states = states_over_time(partial(reconcile, store))
    while any(state.is_live for state in next(states)):
        if time.monotonic() > deadline:
            return False
        time.sleep(REFRESH_SECONDS)
    return True


# The live table of a submitted sweep, fed by the events that jobs write.


def watch(store: Store, plan: "SweepPlan", watched: Sequence[JobArray], console: Console) -> bool:
    """Show the table until all jobs of the arrays have ended.

    Args:
        store: of the sweep.
        plan: its cells.
        watched: the arrays.
        console: where to show it.

    Returns:
        False where the user detached with Ctrl-C.
    """
    from vitsweep.launchers.progress import Progress  # `collect` loads nothing that plans
    from vitsweep.planning.sweep_plan import cell_labels

    num_runs = sum(len(job.runs()) for array in watched for job in array.jobs())
    progress = Progress(console, cell_labels(plan), num_runs)
    try:
        with progress.shown():
            _follow(store, plan, watched, progress)
    except KeyboardInterrupt:
        return False
    return True


def _follow(
    store: Store, plan: "SweepPlan", watched: Sequence[JobArray], progress: "Progress"
) -> None:
    """Report what jobs write, and record what dead ones left, until no job is live."""
    num_read = Counter[Path]()
    states = states_over_time(partial(reconcile, store, watched))
    while True:
        if not store.root.is_dir():
            raise SweepGoneError(store.root)
        for state in (job_states := next(states)):
            path = state.job.events_path
            new = state.events.events[num_read[path] :]
            num_read[path] += len(new)
            for event in new:
                _report_run(plan, progress, event)
        if not any(state.is_live for state in job_states):
            return wait_for_records(store, job_states, progress.console)
        time.sleep(REFRESH_SECONDS)


def _report_run(plan: "SweepPlan", progress: "Progress", event: Mapping[str, Any]) -> None:
    cell = plan.entries.get(event.get("cell_id", ""))
    if cell is None:
        return
    if event["event"] == "run_start":
        progress.started(cell)
    elif event["event"] == "run_end":
        progress.dropped(-1 if event["will_repeat"] else 0)
        status = Status(event["status"])
        speed, reason = event.get("images_per_second"), event.get("reason", "")
        progress.reported(cell, status, reason, speed, block=event.get("block", ""))
