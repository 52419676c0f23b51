"""Files of the job arrays of a sweep: what each job has to run, and the events it writes.

```
jobs/<array>/array.json       what is requested from Slurm, written before the request
jobs/<array>/slurm_id         the array's id in Slurm
jobs/<array>/tasks.jsonl      one line per job of the array: its blocks
jobs/<array>/key              secret with which agents of a job authenticate
jobs/<array>/<index>.jsonl    events of a job: start, runs, heartbeats, signals, end
jobs/<array>/*_log.out        output of its processes
```
Only the job's first node writes its events, so the file stays whole on file systems where appends of
several nodes mix.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.launchers.slurm.state.job_events import JobEvents, Run
from vitsweep.results.files import read_lines
from vitsweep.results.store import Store


@dataclass(frozen=True)
class JobArray:
    """One job array of a sweep.

    Attributes:
        folder: `jobs/<array>` in the sweep folder.
    """

    folder: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What was requested from Slurm.

        Raises:
            VitsweepError: the file is damaged; it is named. `jobs` and `job` raise the same.
        """
        path = self.folder / "array.json"
        return self._parsed(path, path.read_bytes())

    @property
    def slurm_id(self) -> str:
        """Id of the array in Slurm; "" where the submitting command died before it was noted."""
        path = self.folder / "slurm_id"
        if path.exists():
            return path.read_text(encoding="utf-8")
        events = (event for path in self.folder.glob("*.jsonl") for event in read_lines(path))
        return next((event["array_id"] for event in events if "array_id" in event), "")

    def owns(self, script: str) -> bool:
        """Whether a batch script is the one of this array; the folder may have been moved since."""
        return Path(script).parent.name == self.folder.name

    def jobs(self) -> Iterator["ArrayJob"]:
        """Yield the jobs of the array, by index."""
        path = self.folder / "tasks.jsonl"
        for index, line in enumerate(path.read_bytes().splitlines()):
            yield ArrayJob(self, index, self._parsed(path, line))

    def job(self, index: int) -> "ArrayJob":
        """Return one job of the array, without reading the work of the others."""
        path = self.folder / "tasks.jsonl"
        with path.open("rb") as lines:
            line = next(islice(lines, index, None), b"")
        return ArrayJob(self, index, self._parsed(path, line))

    def _parsed(self, path: Path, text: bytes) -> dict[str, Any]:
        try:
            parsed: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise VitsweepError(
                f"`{path}` is damaged ({error}): it is not known what this job array has to run. "
                f"Restore the file from a backup. Or, once Slurm runs no job of array "
                f"{self.slurm_id or '(id unknown)'} any more, remove the folder `{path.parent}`: what "
                "was measured lies in `cells/` and is kept."
            ) from error
        return parsed


@dataclass(frozen=True)
class ArrayJob:
    """One job (Slurm: array task) of a job array.

    Attributes:
        array: the array.
        index: in the array, from 0.
        task: its line of `tasks.jsonl`.
    """

    array: JobArray
    index: int
    task: dict[str, Any]

    @property
    def slurm_id(self) -> str:
        """Its id as Slurm's tools show it, such as `123_4`."""
        return f"{self.array.slurm_id}_{self.index}"

    @property
    def events_path(self) -> Path:
        """File to which it writes its events."""
        return self.array.folder / f"{self.index}.jsonl"

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        """Cell id -> `measurement` and `code_hash` of the command that submitted it."""
        cells: dict[str, dict[str, Any]] = self.task.get("cells", {})
        return cells

    def events(self) -> JobEvents:
        """Return the events it has written by now."""
        return JobEvents(read_lines(self.events_path))

    def runs(self) -> list[Run]:
        """Return the runs it has to do, in order."""
        return [
            Run(block["name"], position, run["cell_id"], run["run_id"])
            for block in self.task["blocks"]
            for position, run in enumerate(block["runs"])
        ]


def cells_submitted_since(store: Store, since: float) -> set[str]:
    """Return the cells of the arrays that were submitted after a time, in seconds since 1970."""
    later = (array for array in job_arrays(store) if array.facts["time"] > since)
    return {run.cell_id for array in later for job in array.jobs() for run in job.runs()}


def job_arrays(store: Store) -> list[JobArray]:
    """Return the job arrays of a sweep, oldest first."""
    return [JobArray(path.parent) for path in sorted(store.root.glob("jobs/*/array.json"))]
