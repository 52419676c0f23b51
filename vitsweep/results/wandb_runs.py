"""Write one W&B run per cell, from a task on standard input; run as a separate process."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from vitsweep.results.store import Store
from vitsweep.results.trackers import by_cell, metrics_of


def write_runs(task: dict[str, Any]) -> None:
    """Write every cell of the task: its spec as config, each run as a step, its row as summary."""
    os.environ["WANDB_SILENT"] = "true"
    records = by_cell(Store(Path(task["root"])))
    for row in task["cells"]:
        _write_run(row, records.get(row["cell_id"], []), task)


def _write_run(row: dict[str, Any], records: list[Any], task: dict[str, Any]) -> None:
    import wandb

    settings = task["tracker"]
    run = wandb.init(
        mode=settings["mode"],
        project=settings["project"],
        dir=task["root"],
        id=f"{task['sweep']}-{row['cell_id']}",
        resume="allow" if settings["mode"] == "online" else None,
        group=task["sweep"],
        name=row["cell_id"],
        config=records[-1].spec if records else {},
        save_code=False,
        settings=wandb.Settings(disable_git=True, x_disable_stats=True, console="off"),
    )
    run.define_metric("*", summary="none")  # the summary is the cell's row, not its last run
    for step, record in enumerate(r for r in records if r.status == "measured"):
        run.log({k: v for k, v in record.metrics.items() if v is not None}, step=step)
    run.summary.update(metrics_of(row) | {"status": row["status"]})
    run.finish()


if __name__ == "__main__":
    write_runs(json.load(sys.stdin))
