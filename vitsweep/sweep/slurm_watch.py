"""The live table of a submitted sweep, fed by what the jobs write."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.sweep.progress import Progress, labels
from vitsweep.sweep.roster import Roster
from vitsweep.sweep.slurm_jobs import Array, read_events
from vitsweep.sweep.slurm_settle import settle

LOOK_SECONDS = 1.0
ASK_SECONDS = 5.0


def watch(store: Store, roster: Roster, watched: Sequence[Array], console: Console) -> bool:
    """Show the table until all jobs have ended; False where the user detached."""
    total = sum(len(e.runs()) for array in watched for e in array.elements())
    progress = Progress(console, labels(roster), total)
    try:
        with progress.shown():
            _follow(store, roster, watched, progress)
    except KeyboardInterrupt:
        return False
    return True


def _follow(store: Store, roster: Roster, watched: Sequence[Array], progress: Progress) -> None:
    read: dict[Path, int] = {}
    asked_at = time.monotonic()
    while True:
        for array in watched:
            _show_new(array, read, roster, progress)
        if time.monotonic() > asked_at + ASK_SECONDS:
            asked_at = time.monotonic()
            if not any(seen.live for seen in settle(store, watched)):
                break
        elif all(_all_ended(array) for array in watched):
            break
        time.sleep(LOOK_SECONDS)
    for array in watched:
        _show_new(array, read, roster, progress)
    settle(store, watched)


def _all_ended(array: Array) -> bool:
    ends = (element.life().end for element in array.elements())
    return all(end is not None and not end.get("requeued") for end in ends)


def _show_new(array: Array, read: dict[Path, int], roster: Roster, progress: Progress) -> None:
    for path in sorted(array.folder.glob("[0-9]*.jsonl")):
        events, read[path] = read_events(path, read.get(path, 0))
        for event in events:
            entry = roster.entries.get(event.get("cell_id", ""))
            if entry is not None and event["event"] == "run_start":
                progress.started(entry)
            elif entry is not None and event["event"] == "run_end":
                progress.dropped(-1 if event["again"] else 0)
                progress.told(
                    entry, Status(event["status"]), event["reason"], event["images_per_second"]
                )
