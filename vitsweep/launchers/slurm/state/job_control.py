"""`vitsweep status` and `vitsweep cancel`: the jobs of a submitted sweep, from any terminal."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.live import Live

from vitsweep.errors import VitsweepError
from vitsweep.launchers.slurm.state.poll import JobState, poll
from vitsweep.launchers.slurm.state.reconcile import reconcile
from vitsweep.launchers.slurm.state.slurm_cli import scancel
from vitsweep.launchers.slurm.state.status_page import Outcome, is_busy, outcomes_of, page
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.tables.formatting import count

REFRESH_SECONDS = 1.0
SECONDS_TO_CANCEL = 60.0
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
        while True:
            start = time.monotonic()
            job_states = poll(store)
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
        raise VitsweepError("Slurm does not answer: nothing was cancelled. Try again later.")
    if not live:
        console.print(f"No job of sweep {store.name} is waiting or running.")
        return 0
    errors = scancel(_ids_to_cancel(live))
    if REFUSED not in errors.lower():
        _wait_until_gone(store, live)
    job_states = poll(store)
    left = _still_live(live, job_states)
    if len(left) < len(live):
        console.print(f"Cancelled {count(len(live) - len(left), 'job')}.", highlight=False)
    console.print(page(store, job_states, outcomes_of(store, job_states)))
    if left:
        ids = ", ".join(left[:3]) + (", ..." if len(left) > 3 else "")
        why = errors or f"Slurm has not ended them within {SECONDS_TO_CANCEL:.0f} s."
        raise VitsweepError(
            f"Not cancelled: {count(len(left), 'job')} of sweep {store.name} ({ids}). {why} Type the "
            "same command again, as the user who submitted them."
        )
    return 0


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
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    while any(state.is_live for state in reconcile(store)):
        if time.monotonic() > deadline:
            return False
        time.sleep(REFRESH_SECONDS)
    return True


def _ids_to_cancel(live: Sequence[JobState]) -> list[str]:
    """Name whole arrays where all their jobs are meant: Slurm cancels these in one step."""
    counts = Counter(state.job.array.slurm_id for state in live)
    size = {state.job.array.slurm_id: state.job.array.facts["num_jobs"] for state in live}
    whole = [array_id for array_id, count in counts.items() if count == size[array_id]]
    return whole + [s.job.slurm_id for s in live if s.job.array.slurm_id not in whole]
