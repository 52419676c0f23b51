"""Sweeps of laboratories that do not exist: real frozen cells, and runs of a known speedup."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.builders import run
from tests.cells import TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.planning.freeze import freeze
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import flatten
from vitsweep.spec.resources import Machine

MACHINE = Machine(device="cpu", cores_per_node=2, devices_per_node=0)
DIFF = "diff --git a/vitsweep/cell.py b/vitsweep/cell.py\n--- a/vitsweep/cell.py\n+# a line\n"


def with_steps(record: RunRecord, steps_ms: list[float]) -> RunRecord:
    """The run with these times of steps, the first of which is warm-up, and the throughput they give."""
    step_ms = float(np.mean(steps_ms[1:]))
    rate = 1e3 * record.spec["images_per_step"] / step_ms
    samples = {"step_time_ms": [steps_ms], "skipped": [False] * len(steps_ms), "warm_up_steps": 1}
    metrics = record.metrics | {"images_per_second": rate, "step_time_ms": step_ms}
    return replace(record, samples=samples, metrics=metrics)


def laboratory(
    folder: Path, *cells: str, ratio: float = 1.5, environment: dict[str, Any] | None = None
) -> Store:
    """Write a sweep of five blocks in which each cell is `ratio` times as fast as its baseline."""
    where = [f"sweep.name={folder.name}", f"sweep.folder={folder.parent}"]
    asked = expand([*TINY, *cells, "resources.ranks_per_node=1", *where], composer())
    plan = plan_of(asked, MACHINE, composer())
    store = Store(folder).create()
    code = {
        "git_commit": "0123abcd",
        "git_dirty": True,
        "git_diff": DIFF,
        "packages": {"torch": "2"},
    }
    freeze(store, plan, sweep_settings(asked[0].tree), code)
    rng = np.random.default_rng(0)
    for block in range(5):
        for number, (cell_id, entry) in enumerate(plan.entries.items()):
            step_ms = 10 / (1 if entry.is_added_baseline else ratio)
            steps = [round(float(t), 4) for t in step_ms * rng.normal(1, 0.02, 9)]
            record = run(
                cell_id, f"b{block}", 100, minute=10 * block + number,
                environment=environment, sweep=folder.name, **flatten(entry.spec),
            )  # fmt: skip
            store.save_run(with_steps(record, steps))
    return store
