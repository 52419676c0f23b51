"""`vitsweep status` and `vitsweep cancel`: the jobs of a submitted sweep, from any terminal."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vitsweep.errors import VitsweepError
from vitsweep.launchers.slurm.state.job_files import JobArray
from vitsweep.launchers.slurm.state.poll import JobState, pending_runs, poll
from vitsweep.launchers.slurm.state.reconcile import reconcile, runs_to_record
from vitsweep.launchers.slurm.state.slurm_cli import scancel
from vitsweep.launchers.unfinished_runs import KILLED, unfinished_runs
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store

REFRESH_SECONDS = 1.0
SECONDS_TO_CANCEL = 60.0
WAITING = "waiting"
MOST_CELLS_LISTED = 100
"""Cells whose reasons `status` lists one by one."""

Outcomes = dict[str, tuple[str, str]]
"""Cell id -> status and reason."""


def status(store: Store, watch: bool, console: Console) -> int:
    """Show the jobs and cells of a sweep.

    Args:
        store: of the sweep.
        watch: show them again and again until no job is left.
        console: where to show them.

    Returns:
        0; 3 where nothing runs any more and not all cells were measured.
    """
    if not watch:
        job_states = poll(store)
        outcomes = _outcomes(store, job_states)
        console.print(page(store, job_states, outcomes))
        return _exit_code(outcomes, job_states)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            start = time.monotonic()
            job_states = poll(store)
            outcomes = _outcomes(store, job_states)
            live.update(page(store, job_states, outcomes), refresh=True)
            if not any(state.is_live for state in job_states):
                return _exit_code(outcomes, job_states)
            # a large sweep takes seconds to read: at most a third of the time is spent on it
            time.sleep(max(REFRESH_SECONDS, 2 * (time.monotonic() - start)))


def page(store: Store, job_states: Sequence[JobState], outcomes: Outcomes) -> RenderableType:
    """Return a table of the job arrays, the number of cells by status, and why cells have no result."""
    counts = Counter(status for status, _ in outcomes.values())
    cells = " · ".join(f"{name} {count}" for name, count in counts.most_common())
    parts: list[RenderableType] = [_arrays_table(job_states)] if job_states else []
    parts.append(Text(f"Cells of {store.name}: {cells}"))
    if any(state.state == "unknown" for state in job_states):
        clusters = {s.job.array.facts.get("cluster", "") for s in job_states} - {""}
        where = f" for cluster {', '.join(sorted(clusters))}" if clusters else ""
        parts.append(
            Text(f"Slurm does not answer{where}: the state of its jobs is as they last wrote it.")
        )
    parts += [Text(f"  {line}") for line in _without_result(outcomes)]
    if hint := reconcile_hint(store, job_states):
        parts.append(Text(hint))
    return Group(*parts)


def reconcile_hint(store: Store, job_states: Sequence[JobState]) -> str:
    """Return how to record the runs that dead jobs did not finish, or "" where there are none."""
    dead = [state for state in job_states if runs_to_record(store, state)]
    if not dead:
        return ""
    ids = ", ".join(state.job.slurm_id for state in dead[:3]) + (", ..." if len(dead) > 3 else "")
    return (
        f"{len(dead)} jobs ended without recording all their runs ({ids}): `vitsweep collect "
        f"{sweep_argument(store)} --reconcile` records why; the same command runs them again."
    )


def sweep_argument(store: Store) -> str:
    """Return what to type for a sweep: its name, or its folder where that is not in `results/`."""
    return store.name if store.root.parent.name == "results" else str(store.root)


def _arrays_table(job_states: Sequence[JobState]) -> Table:
    table = Table(title="Jobs", title_justify="left")
    for column in ("array", "nodes x ranks", "waiting", "running", "ended", "runs", "now"):
        table.add_column(column, overflow="fold")
    by_array: dict[JobArray, list[JobState]] = {}
    for state in job_states:
        by_array.setdefault(state.job.array, []).append(state)
    for array, members in by_array.items():
        counts = Counter(state.state for state in members)
        num_runs = sum(len(state.job.runs()) for state in members)
        num_remaining = sum(state.num_remaining_runs for state in members)
        request = array.facts["request"]
        table.add_row(
            array.slurm_id or "?",
            f"{request['nodes']} x {request['ranks_per_node']}",
            str(counts["waiting"]),
            str(counts["running"] + counts["unknown"]),
            str(counts["ended"] + counts["gone"]),
            f"{num_runs - num_remaining}/{num_runs}",
            Text(_current_activity(members)),
        )
    return table


def _without_result(outcomes: Outcomes) -> Iterator[str]:
    """Yield a line per cell that ended without a measurement; of many, one line per reason."""
    ended = {c: o for c, o in outcomes.items() if o[0] not in (Status.measured, WAITING, "running")}
    if len(ended) <= MOST_CELLS_LISTED:
        for cell_id, (status, reason) in ended.items():
            yield f"{cell_id} {status}: {reason}"
        return
    for (status, reason), count in Counter(ended.values()).most_common(MOST_CELLS_LISTED):
        example = next(cell_id for cell_id, outcome in ended.items() if outcome == (status, reason))
        cells = f"{count} cells ({example}, ...)" if count > 1 else example
        yield f"{cells} {status}: {reason}"
    yield "All of them are in the table of `vitsweep collect`."


def _current_activity(members: Sequence[JobState]) -> str:
    """Return why jobs wait, and up to three of the cells that run."""
    reasons = {s.slurm.reason for s in members if s.state == "waiting" and s.slurm}
    cells = [
        state.events.in_flight["cell_id"]
        for state in members
        if state.state == "running" and state.events.in_flight
    ]
    return ", ".join([*sorted(reasons - {"None", ""}), *cells[:3]])


def _outcomes(store: Store, job_states: Sequence[JobState]) -> Outcomes:
    """Return cell id -> status and reason, over all its runs.

    A cell without a run that a live job will still do is waiting, whatever became of an earlier job.
    """
    from pandas import DataFrame

    from vitsweep.tables.status import final_status

    columns = ("cell_id", "status", "reason", "failed_rank", "attempt", "started_at")
    runs = [(*(getattr(r, c) for c in columns[:-1]), _started_at(r)) for r in store.runs()]
    outcomes: Outcomes = {}
    if runs:
        for row in final_status(DataFrame(runs, columns=columns)).to_dict("records"):
            outcomes[row["cell_id"]] = str(row["status"]), str(row["reason"])
    coming = {run.cell_id for run in pending_runs(job_states)}
    for cell_id in store.cells_without_runs():
        kept = (
            {} if cell_id in coming else store.kept_row(cell_id) or _last_unfinished(store, cell_id)
        )
        outcomes[cell_id] = str(kept.get("status") or WAITING), str(kept.get("reason") or "")
    return outcomes


def _last_unfinished(store: Store, cell_id: str) -> dict[str, str]:
    """Return what became of the run of a cell that has started on this machine and has no record."""
    for run in unfinished_runs(store, cell_id)[-1:]:
        return {"status": "running"} if run.is_running else {"status": "killed", "reason": KILLED}
    return {}


def _started_at(run: RunRecord) -> str | None:
    return run.environment.get("started_at")


def _exit_code(outcomes: Outcomes, job_states: Sequence[JobState]) -> int:
    if any(state.is_live for state in job_states):
        return 0
    return 0 if all(status == Status.measured for status, _ in outcomes.values()) else 3


def cancel(store: Store, console: Console) -> int:
    """End the live jobs of a sweep; what was measured stays, the rest is recorded as killed.

    Returns:
        0.

    Raises:
        VitsweepError: Slurm does not answer.
    """
    live = [state for state in poll(store) if state.is_live]
    if any(state.state == "unknown" for state in live):
        raise VitsweepError("Slurm does not answer: nothing was cancelled. Try again later.")
    if not live:
        console.print(f"No job of sweep {store.name} is waiting or running.")
        return 0
    errors = scancel(_ids_to_cancel(live))
    deadline = time.monotonic() + SECONDS_TO_CANCEL
    while any(state.is_live for state in reconcile(store)) and time.monotonic() < deadline:
        time.sleep(0.5)
    console.print(f"Cancelled {len(live)} jobs. {errors}", highlight=False)
    job_states = poll(store)
    console.print(page(store, job_states, _outcomes(store, job_states)))
    return 0


def _ids_to_cancel(live: Sequence[JobState]) -> list[str]:
    """Name whole arrays where all their jobs are meant: Slurm cancels these in one step."""
    counts = Counter(state.job.array.slurm_id for state in live)
    size = {state.job.array.slurm_id: state.job.array.facts["num_jobs"] for state in live}
    whole = [array_id for array_id, count in counts.items() if count == size[array_id]]
    return whole + [s.job.slurm_id for s in live if s.job.array.slurm_id not in whole]
