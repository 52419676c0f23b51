"""`vitsweep status` and `vitsweep cancel`: the life of a submitted sweep, from any terminal."""

import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vitsweep.errors import VitsweepError
from vitsweep.launchers.slurm.state.job_files import Array
from vitsweep.launchers.slurm.state.poll import JobState, look
from vitsweep.launchers.slurm.state.reconcile import reconcile
from vitsweep.launchers.slurm.state.slurm_cli import cancel as scancel
from vitsweep.results.record import Status
from vitsweep.results.store import Store

WATCH_SECONDS = 1.0
SECONDS_TO_CANCEL = 60.0
WAITING = "waiting"


def status(store: Store, watch: bool, console: Console) -> int:
    """Show jobs and cells; with `watch` again and again until no job is left.

    Returns:
        0; 3 where nothing runs any more and cells ended otherwise.
    """
    if not watch:
        seen = reconcile(store)
        console.print(page(store, seen))
        return _code(store, seen)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            begin = time.monotonic()
            seen = reconcile(store)
            live.update(page(store, seen), refresh=True)
            if not any(one.live for one in seen):
                return _code(store, seen)
            time.sleep(max(WATCH_SECONDS, 2 * (time.monotonic() - begin)))  # large sweeps take long


def page(store: Store, seen: Sequence[JobState]) -> RenderableType:
    """Return what there is to see of a sweep."""
    reasons = _reasons(store)
    counts = Counter(status for status, _ in reasons.values())
    cells = " · ".join(f"{name} {count}" for name, count in counts.most_common())
    parts: list[RenderableType] = [_arrays(seen)] if seen else []
    parts.append(Text(f"Cells of {store.name}: {cells}"))
    if any(one.state == "unknown" for one in seen):
        parts.append(Text("Slurm does not answer: the state of its jobs is as they last wrote it."))
    otherwise = {c: r for c, r in reasons.items() if r[0] not in (Status.measured, WAITING)}
    parts += [Text(f"  {cell} {name}: {why}") for cell, (name, why) in otherwise.items()]
    return Group(*parts)


def _arrays(seen: Sequence[JobState]) -> Table:
    table = Table(title="Jobs", title_justify="left")
    for column in ("array", "nodes x ranks", "waiting", "running", "ended", "runs", "now"):
        table.add_column(column, overflow="fold")
    by_array: dict[Array, list[JobState]] = {}
    for one in seen:
        by_array.setdefault(one.element.array, []).append(one)
    for array, elements in by_array.items():
        states = Counter(one.state for one in elements)
        runs = sum(len(one.element.runs()) for one in elements)
        left = sum(one.left for one in elements)
        request = array.facts["request"]
        table.add_row(
            array.slurm_id or "?",
            f"{request['nodes']} x {request['ranks_per_node']}",
            str(states["waiting"]),
            str(states["running"] + states["unknown"]),
            str(states["ended"] + states["gone"]),
            f"{runs - left}/{runs}",
            Text(_now(elements)),
        )
    return table


def _now(elements: Sequence[JobState]) -> str:
    """Why jobs wait, and which cells run."""
    waits = {one.job.reason for one in elements if one.state == "waiting" and one.job}
    runs = [
        one.life.in_flight["cell_id"]
        for one in elements
        if one.state == "running" and one.life.in_flight
    ]
    return ", ".join([*sorted(waits - {"None", ""}), *runs[:3]])


def _reasons(store: Store) -> dict[str, tuple[str, str]]:
    """Return cell -> status and reason, over all its runs."""
    from vitsweep.tables.load import cells_of

    table = cells_of(store)
    rows = table.to_dict("records")
    return {
        row["cell_id"]: (str(row["status"] or WAITING), str(row.get("reason") or ""))
        for row in rows
    }


def _code(store: Store, seen: Sequence[JobState]) -> int:
    if any(one.live for one in seen):
        return 0
    return 0 if all(name == Status.measured for name, _ in _reasons(store).values()) else 3


def cancel(store: Store, console: Console) -> int:
    """End the live jobs of a sweep; what was measured stays, the rest is recorded as killed.

    Raises:
        VitsweepError: Slurm does not answer.
    """
    live = [one for one in look(store) if one.live]
    if any(one.state == "unknown" for one in live):
        raise VitsweepError("Slurm does not answer: nothing was cancelled. Try again later.")
    if not live:
        console.print(f"No job of sweep {store.name} is waiting or running.")
        return 0
    complaints = scancel(_names(live))
    deadline = time.monotonic() + SECONDS_TO_CANCEL
    while any(one.live for one in reconcile(store)) and time.monotonic() < deadline:
        time.sleep(0.5)
    console.print(f"Cancelled {len(live)} jobs. {complaints}", highlight=False)
    console.print(page(store, look(store)))
    return 0


def _names(live: Sequence[JobState]) -> list[str]:
    """Name whole arrays where all their elements are meant: Slurm takes that in one step."""
    counts = Counter(one.element.array.slurm_id for one in live)
    whole = {one.element.array.slurm_id: one.element.array.facts["elements"] for one in live}
    arrays = [array for array, count in counts.items() if count == whole[array]]
    return arrays + [o.element.name for o in live if o.element.array.slurm_id not in arrays]
