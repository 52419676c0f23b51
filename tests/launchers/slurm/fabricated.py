"""A sweep of two cells in one job, and what a Slurm that is not there says about it."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cells import entry
from vitsweep.execution.run_request import frozen_document
from vitsweep.files import append_line
from vitsweep.launchers.slurm.commands import SlurmJob
from vitsweep.launchers.slurm.state import poll
from vitsweep.launchers.slurm.state.jobs import JobArray
from vitsweep.results.store import Store
from vitsweep.tables.load import cells_of

CODE = {"git_commit": "c", "git_dirty": False, "git_diff": "", "packages": {}}
SCRIPT = "/results/s/jobs/a/submission.sh"
START = {"event": "job_start", "restart": 0, "array_id": "7"}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> dict[str, SlurmJob | None]:
    """What Slurm knows: job -> state; None under "queue" where it does not answer."""
    known: dict[str, Any] = {}
    jobs = lambda ids: None if "silent" in known else dict(known)  # noqa: E731
    monkeypatch.setattr(poll, "squeue", jobs)
    monkeypatch.setattr(poll, "controller_settings", dict)
    monkeypatch.setattr(poll, "submitted_scripts", lambda users: {})
    return known


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A sweep of two cells in one job, `7_0`."""
    store = Store(tmp_path / "s").create()
    cells = [entry("sharding=ddp"), entry("sharding=fsdp")]
    runs = []
    for cell in cells:
        store.freeze(cell.cell_id, frozen_document(cell.spec, cell.tree, (), CODE))
        runs.append({"cell_id": cell.cell_id, "run_id": f"b-{cell.cell_id}"})
    folder = store.root / "jobs" / "a"
    folder.mkdir(parents=True)
    (folder / "tasks.jsonl").write_text(
        json.dumps({"blocks": [{"name": "b", "runs": runs}]}) + "\n"
    )
    facts = {
        "time": time.time(),
        "num_jobs": 1,
        "max_attempts": 3,
        "request": {"nodes": 1, "ranks_per_node": 2},
    }
    (folder / "array.json").write_text(json.dumps(facts))
    (folder / "slurm_id").write_text("7")
    return store


def write_events(store: Store, *events: dict[str, Any]) -> None:
    for event in events:
        append_line(store.root / "jobs" / "a" / "0.jsonl", event)


def first_run_start(store: Store) -> dict[str, Any]:
    [job] = JobArray(store.root / "jobs" / "a").jobs()
    run = job.runs()[0]
    return {"event": "run_start", "run": run.name, "cell_id": run.cell_id, "run_id": run.name}


def rows(store: Store) -> list[tuple[str, str]]:
    """Status and reason of the cells that do not wait any more."""
    table = cells_of(store).dropna(subset="status")
    return [(str(row["status"]), str(row["reason"])) for row in table.to_dict("records")]
