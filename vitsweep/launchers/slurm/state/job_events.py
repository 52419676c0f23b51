"""The life of one job: what it wrote of its starts, runs and ends."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitsweep.execution.run_request import run_id_of


@dataclass(frozen=True)
class Run:
    """A run that a job was told to do, once or until it ends.

    Attributes:
        block: name of its block.
        position: place in the block.
        cell_id: cell.
        name: `run_id` of the first attempt.
    """

    block: str
    position: int
    cell_id: str
    name: str

    def run_id(self, attempt: int) -> str:
        """Name of an attempt."""
        return run_id_of(self.name, attempt)


@dataclass(frozen=True)
class JobEvents:
    """What an element wrote: `job_start run_start run_end beat signal job_end`, oldest first.

    `closed` is written by whoever records what a dead job left behind.
    """

    events: list[dict[str, Any]]

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of some kinds."""
        return [event for event in self.events if event["event"] in kinds]

    @property
    def last_start(self) -> dict[str, Any] | None:
        """The latest start of the job, or None before the first."""
        return next(iter(self.of("job_start")[::-1]), None)

    @property
    def end(self) -> dict[str, Any] | None:
        """How the job ended since it last started, by its own word; None while it runs or waits."""
        last = next(iter(self.of("job_start", "job_end")[::-1]), None)
        return last if last and last["event"] == "job_end" else None

    @property
    def closed(self) -> bool:
        """Whether what a dead job left behind is recorded already."""
        last = next(iter(self.of("job_start", "closed")[::-1]), None)
        return last is not None and last["event"] == "closed"

    @property
    def in_flight(self) -> dict[str, Any] | None:
        """Start of the run that has not ended, or None."""
        last = next(iter(self.of("run_start", "run_end")[::-1]), None)
        return last if last and last["event"] == "run_start" else None

    def attempts(self, run: Run) -> int:
        """How often a run has started."""
        return sum(event["run"] == run.name for event in self.of("run_start"))

    def times_saved(self, run: Run) -> int:
        """How many starts of a run have brought its training further."""
        ends = (event for event in self.of("run_end") if event["run"] == run.name)
        return len({event.get("saved_step") or 0 for event in ends} - {0})

    def ended(self) -> dict[str, str]:
        """Run -> status, of the runs that will not be repeated by the job."""
        return {e["run"]: e["status"] for e in self.of("run_end") if not e["again"]}


def read_events(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines written since `offset`, and the offset behind them."""
    with path.open("rb") as handle:
        handle.seek(offset)
        text = handle.read()
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], offset + len(whole)
