"""Jobs of a sweep as files: what each was told to run, and what it wrote of its own life.

```
jobs/<array>/array.json       what is asked of Slurm, written before it is asked
jobs/<array>/slurm_id         the id that Slurm gave
jobs/<array>/tasks.jsonl      one line per element of the array: its blocks
jobs/<array>/<index>.jsonl    life of an element: start, runs, heartbeats, signals, end
jobs/<array>/*_log.out        what its processes printed
```
Each life has one writer, the job's first node; so it is whole on file systems where appends of
several nodes mix.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from vitsweep.results.store import Store, read_lines


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
        """Name of an attempt: each has a record of its own, so none can overwrite another's."""
        return self.name if attempt == 1 else f"{self.name}-{attempt}"


@dataclass(frozen=True)
class Array:
    """One job array of a sweep."""

    folder: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What was asked of Slurm."""
        facts: dict[str, Any] = json.loads((self.folder / "array.json").read_text())
        return facts

    @property
    def slurm_id(self) -> str:
        """Id of the array in Slurm; "" where the submitting command died before it was told."""
        path = self.folder / "slurm_id"
        if path.exists():
            return path.read_text()
        starts = (line for life in self.folder.glob("*.jsonl") for line in read_lines(life))
        return next((line["array_id"] for line in starts if "array_id" in line), "")

    def elements(self) -> Iterator["Element"]:
        """Yield the jobs of the array."""
        lines = (self.folder / "tasks.jsonl").read_text().splitlines()
        for index, line in enumerate(lines):
            yield Element(self, index, json.loads(line))

    def element(self, index: int) -> "Element":
        """Return one job of the array."""
        with (self.folder / "tasks.jsonl").open() as lines:
            return Element(self, index, json.loads(next(islice(lines, index, None))))


@dataclass(frozen=True)
class Element:
    """One job."""

    array: Array
    index: int
    task: dict[str, Any]

    @property
    def name(self) -> str:
        """Its id in Slurm, `123_4`."""
        return f"{self.array.slurm_id}_{self.index}"

    @property
    def life_path(self) -> Path:
        """Where it writes its life."""
        return self.array.folder / f"{self.index}.jsonl"

    def life(self) -> "Life":
        """What it wrote by now."""
        return Life(read_lines(self.life_path))

    def runs(self) -> list[Run]:
        """What it was told to run, in order."""
        return [
            Run(block["name"], position, run["cell_id"], run["run_id"])
            for block in self.task["blocks"]
            for position, run in enumerate(block["runs"])
        ]


@dataclass(frozen=True)
class Life:
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

    def ended(self) -> dict[str, str]:
        """Run -> status, of the runs that will not be repeated by the job."""
        return {e["run"]: e["status"] for e in self.of("run_end") if not e["again"]}


def arrays(store: Store) -> list[Array]:
    """Return the arrays of a sweep, oldest first."""
    return [Array(path.parent) for path in sorted(store.root.glob("jobs/*/array.json"))]


def read_events(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Return the whole lines written since `offset`, and the offset behind them."""
    with path.open("rb") as handle:
        handle.seek(offset)
        text = handle.read()
    whole = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], offset + len(whole)
