"""Copies of a sweep's records for Weights & Biases.

They are written from the store, never by a rank, in a separate process with a time limit: a tracker
that hangs (wandb#919, #5601, #6949) does not affect a measurement. API keys are read by W&B from its own
environment or file; none is stored here.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vitsweep.console import captured
from vitsweep.errors import VitsweepError
from vitsweep.files import make_folder
from vitsweep.interpreters import command_of
from vitsweep.results.metrics import FLAGS, METRICS
from vitsweep.results.store import Store

WANDB_CONFIG = ("cell_id", "device", "torch", "cuda", "git_commit", "started_at")
"""Columns besides the spec; the last is when the latest run began."""
WANDB_SUMMARY = ("status", "claim", "speedup_note", "blocks", "baseline")
LONGEST_TAG = 64
"""Characters; W&B refuses a longer one."""
LONGEST_S = 86_400


FOLDER = "wandb"
"""Of a sweep's folder."""
MODES = ("none", "offline", "online")


def check_tracker(tracker: Mapping[str, Any]) -> None:
    """Refuse a tracker that cannot work here, before anything runs.

    Args:
        tracker: the composed `tracker` node, whose mode is not `none`.

    Raises:
        VitsweepError: its mode is unknown, or its time limit or project is wrong.
    """
    if (mode := tracker["mode"]) not in MODES:
        known = ", ".join(f"`{m}`" for m in MODES)
        raise VitsweepError(f"`tracker.mode={mode}`: must be one of {known}.")
    limit = tracker.get("time_limit_s")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit <= LONGEST_S:
        raise VitsweepError(
            f"`tracker.time_limit_s={limit}`: must be a number of seconds above 0, at most {LONGEST_S}."
        )
    project = tracker.get("project", "vitsweep")
    if not isinstance(project, str) or not project.strip() or not project.isprintable():
        raise VitsweepError(f"`tracker.project={project}`: must be the name of a project.")


def mirror(
    store: Store,
    rows: Sequence[Mapping[Any, Any]],
    tracker: Mapping[str, Any],
    answers: Sequence[str] = (),
) -> str:
    """Copy cells to the tracker that a command names; return one sentence.

    Args:
        store: the sweep folder; offline runs are written into it.
        rows: one per cell, as in `cells.parquet`.
        tracker: the composed `tracker` node.
        answers: the result of the sweep, in the sentences that the terminal shows.
    """
    cells = [_plain(row) for row in rows if row.get("status") == "measured"]
    task = {
        "root": str(store.root.absolute()),
        "sweep": store.name,
        "tracker": dict(tracker),
        "cells": cells,
        "answers": list(answers),
    }
    make_folder(store.root / FOLDER)
    limit = float(tracker["time_limit_s"])
    # of the current folder, and of that in WANDB_DIR, it reads `wandb/settings`: where it sends the key to
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_DIR"}
    try:
        with TemporaryDirectory(prefix="vitsweep-wandb-", ignore_cleanup_errors=True) as empty:
            done = captured(
                command_of("vitsweep.extras.mirror.wandb_runs"),
                input=json.dumps(task),
                timeout=limit,
                cwd=empty,
                env=environment,
            )
    except subprocess.TimeoutExpired:
        return (
            f"The W&B mirror was given up after {limit:g} s; the records are complete without it."
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"The W&B mirror failed ({last}); the records are complete without it."
    folder, plural = f"{store.root}/{FOLDER}", "s" * (len(cells) != 1)
    uploads = f" `wandb sync {folder}/offline-run-*` uploads them."
    said = f"Mirrored {len(cells)} cell{plural} to W&B ({tracker['mode']}) in `{folder}`."
    return said + uploads * (tracker["mode"] == "offline")


def _plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert a row to JSON types: missing values of any kind become null."""
    return {str(key): _value(value) for key, value in row.items()}


def _value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_value(part) for part in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None if str(value) in ("<NA>", "NaT") else str(value)
    return number if math.isfinite(number) else None


def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the measured columns of a row that hold a number; no ratio without its interval."""
    is_bare = row.get("speedup_low") is None and row.get("claim") != "baseline"
    known = (m for m in METRICS if not (is_bare and m == "speedup"))
    return {m: row[m] for m in known if isinstance(row.get(m), (int, float))}


# The process that writes a copy, from a task on standard input.


def write_runs(task: dict[str, Any]) -> None:
    """Write one run for every cell of the task."""
    store = Store(Path(task["root"]))
    for row in task["cells"]:
        _write_run(row, list(store.runs(row["cell_id"])), task)


def _write_run(row: dict[str, Any], records: list[Any], task: dict[str, Any]) -> None:
    """Write spec and environment as config, each run as a step, the row with its claim as summary."""
    os.environ["WANDB_SILENT"] = "true"
    import wandb

    settings = task["tracker"]
    run = wandb.init(
        mode=settings["mode"],
        project=settings["project"],
        dir=task["root"],
        id=f"{task['sweep']}-{row['cell_id']}",
        resume="allow" if settings["mode"] == "online" else None,
        group=task["sweep"],
        name=row.get("name") or row["cell_id"],
        tags=[tag[:LONGEST_TAG] for tag in row.get("tags", ())],
        notes="\n".join(task["answers"]) or None,
        config=(records[-1].spec if records else {}) | {c: row.get(c) for c in WANDB_CONFIG},
        save_code=False,
        settings=wandb.Settings(disable_git=True, x_disable_stats=True, console="off"),
    )
    run.define_metric("*", summary="none")  # the summary is the cell's row, not its last run
    for step, record in enumerate(r for r in records if r.status == "measured"):
        run.log({k: v for k, v in record.metrics.items() if v is not None}, step=step)
    claims = {c: row[c] for c in WANDB_SUMMARY if row.get(c) not in (None, "")}
    flags = [flag for flag in FLAGS if row.get(flag)]
    run.summary.update(metrics_of(row) | claims | {"flags": flags})
    run.finish()


if __name__ == "__main__":
    write_runs(json.load(sys.stdin))
