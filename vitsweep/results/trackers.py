"""Copies of a sweep's records for experiment trackers (W&B, TensorBoard).

They are written from the store, never by a rank, in a separate process with a time limit: a tracker
that hangs (wandb#919, #5601, #6949) does not affect a measurement. API keys are read by the tracker
from its own environment or file; none is stored here.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitsweep.console import captured
from vitsweep.errors import VitsweepError
from vitsweep.files import make_folder
from vitsweep.results.metrics import FLAGS, METRICS
from vitsweep.results.store import Store

WANDB_CONFIG = ("cell_id", "device", "torch", "cuda", "git_commit", "started_at")
"""Columns beside the spec; the last is when the latest run began."""
WANDB_SUMMARY = ("status", "claim", "speedup_note", "blocks", "baseline")
LONGEST_TAG = 64
"""Characters; W&B refuses a longer one."""
LONGEST_S = 86_400


@dataclass(frozen=True)
class Mirror:
    """A tracker and what writes to it.

    Attributes:
        name: as shown in messages.
        package: Python package that it needs.
        install: what to `pip install` for it.
        folder: its folder in the sweep folder.
    """

    name: str
    package: str
    install: str
    folder: str


_WANDB = Mirror("W&B", "wandb", "wandb", "wandb")
MIRRORS: Mapping[str, Mirror] = {
    "offline": _WANDB,
    "online": _WANDB,
    "tensorboard": Mirror("TensorBoard", "tensorboard", "vitsweep[tensorboard]", "tensorboard"),
}
"""`tracker.mode` -> the tracker."""


def check_tracker(tracker: Mapping[str, Any]) -> None:
    """Refuse a tracker that cannot work here, before anything runs.

    Args:
        tracker: the composed `tracker` node.

    Raises:
        VitsweepError: its mode is unknown, its package is missing, its time limit or project is wrong.
    """
    mode = str(tracker.get("mode", "none"))
    if mode == "none":
        return
    if mode not in MIRRORS:
        known = ", ".join(f"`{m}`" for m in ("none", *MIRRORS))
        raise VitsweepError(f"`tracker.mode={mode}`: must be one of {known}.")
    limit = tracker.get("time_limit_s")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit <= LONGEST_S:
        raise VitsweepError(
            f"`tracker.time_limit_s={limit}`: must be a number of seconds above 0, at most {LONGEST_S}."
        )
    project = tracker.get("project", "vitsweep")
    if not isinstance(project, str) or not project.strip() or not project.isprintable():
        raise VitsweepError(f"`tracker.project={project}`: must be the name of a project.")
    package = MIRRORS[mode]
    if find_spec(package.package) is None:
        raise VitsweepError(
            f"`tracker.mode={mode}` needs a package that is not installed here: "
            f"`pip install '{package.install}'`, or leave the tracker out; records are complete "
            "without it."
        )


def mirror(
    store: Store,
    rows: Sequence[Mapping[Any, Any]],
    tracker: Mapping[str, Any],
    answers: Sequence[str] = (),
) -> str:
    """Copy cells to the tracker that a command names; return one sentence, "" for `tracker=none`.

    Args:
        store: the sweep folder; offline runs are written into it.
        rows: one per cell, as in `cells.parquet`.
        tracker: the composed `tracker` node.
        answers: the result of the sweep, in the sentences that the terminal shows.
    """
    mode = str(tracker.get("mode", "none"))
    if mode == "none":
        return ""
    kept = MIRRORS[mode]
    cells = [_plain(row) for row in rows if row.get("status") == "measured"]
    task = {
        "root": str(store.root),
        "sweep": store.name,
        "tracker": dict(tracker),
        "cells": cells,
        "answers": list(answers),
    }
    make_folder(store.root / kept.folder)
    limit = float(tracker["time_limit_s"])
    command = [sys.executable, "-m", "vitsweep.results.trackers"]
    try:
        done = captured(command, input=json.dumps(task), timeout=limit)
    except subprocess.TimeoutExpired:
        return (
            f"The {kept.name} mirror was given up after {limit:g} s; the records are complete "
            "without it."
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"The {kept.name} mirror failed ({last}); the records are complete without it."
    how = f" ({mode})" if kept is _WANDB else ""
    return f"Mirrored {len(cells)} cells to {kept.name}{how} in `{store.root}/{kept.folder}`."


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

RUN, CELL = "run", "cell"
"""Prefixes of tags: metrics of each run (one step per run), and metrics of the cell over its runs."""

EVENTS = "events.out.tfevents.*"


def write_runs(task: dict[str, Any]) -> None:
    """Write one run of the task's tracker for every cell of the task."""
    is_wandb = MIRRORS[task["tracker"]["mode"]] is _WANDB
    write = _write_wandb_run if is_wandb else _write_tensorboard_run
    store = Store(Path(task["root"]))
    for row in task["cells"]:
        write(row, list(store.runs(row["cell_id"])), task)


def _write_wandb_run(row: dict[str, Any], records: list[Any], task: dict[str, Any]) -> None:
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


def _write_tensorboard_run(row: dict[str, Any], records: list[Any], task: dict[str, Any]) -> None:
    """Write the runs as steps, the row, and the spec as hyperparameters.

    TensorBoard's own writer needs neither TensorFlow nor torch.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = Path(task["root"]) / "tensorboard" / row["cell_id"]
    for before in make_folder(folder).glob(EVENTS):  # the copy has the records as they are now
        before.unlink()
    writer = EventFileWriter(str(folder))

    def add(summary: Any, step: int = 0) -> None:
        writer.add_event(Event(summary=summary, step=step, wall_time=time.time()))

    add(hparams_pb(_choices(records[-1].spec) if records else {}))
    for step, record in enumerate(r for r in records if r.status == "measured"):
        add(_scalars(RUN, {k: v for k, v in record.metrics.items() if v is not None}), step)
    add(_scalars(CELL, metrics_of(row)))
    writer.close()


def _choices(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what TensorBoard takes as a hyperparameter; lists become text, missing ones are left out."""
    known = {name: value for name, value in spec.items() if value is not None}
    plain = (str, bool, int, float)
    return {n: v if isinstance(v, plain) else json.dumps(v) for n, v in known.items()}


def _scalars(prefix: str, values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    found = [Summary.Value(tag=f"{prefix}/{m}", simple_value=v) for m, v in values.items()]
    return Summary(value=found)


if __name__ == "__main__":
    write_runs(json.load(sys.stdin))
