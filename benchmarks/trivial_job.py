#!/usr/bin/env python3
"""Stands in for a job's agent in benchmarks: writes a record for each of its runs, trains nothing."""

import json
import os
import sys
import time
from itertools import islice
from pathlib import Path


def main(folder: Path) -> None:
    """Do what `vitsweep.launchers.slurm.node.agent` would, in no time."""
    index = int(os.environ["SLURM_ARRAY_TASK_ID"])
    with (folder / "tasks.jsonl").open(encoding="utf-8") as lines:
        task = json.loads(next(islice(lines, index, None)))
    events = [{"event": "job_start", "restart": 0, "time": time.time(), "nodes": ["trivial"]}]
    for block in task["blocks"]:
        for position, run in enumerate(block["runs"]):
            events += record(folder.parents[1], block["name"], position, run)
    events.append({"event": "job_end", "cause": "done", "reason": "", "time": time.time()})
    (folder / f"{index}.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in events), encoding="utf-8"
    )
    (folder / f"{index}.done").touch()


def record(sweep: Path, block: str, position: int, run: dict[str, str]) -> list[dict[str, object]]:
    """Write one record; return its events."""
    path = sweep / "cells" / run["cell_id"] / "runs" / f"{run['run_id']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = run | {
        "sweep": sweep.name,
        "block": block,
        "position": position,
        "attempt": 1,
        "status": "measured",
        "spec": {"model": "trivial"},
        "metrics": {"images_per_second": 1.0},
        "schema_version": 1,
    }
    path.write_text(json.dumps(whole), encoding="utf-8")
    return [
        {"event": "run_start", "run": run["run_id"], "cell_id": run["cell_id"]},
        {
            "event": "run_end",
            "run": run["run_id"],
            "cell_id": run["cell_id"],
            "status": "measured",
            "will_repeat": False,
        },
    ]


if __name__ == "__main__":
    main(Path(sys.argv[sys.argv.index("vitsweep.launchers.slurm.node.agent") + 1]))
