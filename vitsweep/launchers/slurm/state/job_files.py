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

from vitsweep.launchers.slurm.state.job_events import JobEvents, Run
from vitsweep.results.store import Store, read_lines


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

    def life(self) -> "JobEvents":
        """What it wrote by now."""
        return JobEvents(read_lines(self.life_path))

    def runs(self) -> list[Run]:
        """What it was told to run, in order."""
        return [
            Run(block["name"], position, run["cell_id"], run["run_id"])
            for block in self.task["blocks"]
            for position, run in enumerate(block["runs"])
        ]


def arrays(store: Store) -> list[Array]:
    """Return the arrays of a sweep, oldest first."""
    return [Array(path.parent) for path in sorted(store.root.glob("jobs/*/array.json"))]
