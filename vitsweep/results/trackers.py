"""Mirrors of the record: people watch dashboards, the record stays the truth.

A mirror is made from the store, never by a rank, in a process of its own with a time limit: a
tracker that hangs (wandb#919, #5601, #6949) costs a cell nothing. Keys are read by the tracker from
its own environment or file; none is written here.
"""

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import METRICS
from vitsweep.results.store import Store

SYNC_LIMIT_S = 600


def mirror(store: Store, rows: Sequence[Mapping[str, Any]], tracker: Mapping[str, Any]) -> str:
    """Mirror cells as the tracker of a command asks; return one sentence, "" for `tracker=none`.

    Args:
        store: the sweep folder; offline runs are written into it.
        rows: one per cell, as in `cells.parquet`.
        tracker: the composed `tracker` node.
    """
    if tracker.get("mode", "none") == "none":
        return ""
    cells = [_plain(row) for row in rows if row.get("status") == "measured"]
    task = {
        "root": str(store.root),
        "sweep": store.name,
        "tracker": dict(tracker),
        "cells": cells,
    }
    limit = float(tracker["time_limit_s"])
    command = [sys.executable, "-m", "vitsweep.results.wandb_runs"]
    try:
        done = subprocess.run(
            command, input=json.dumps(task), capture_output=True, text=True, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return (
            f"The W&B mirror was given up after {limit:g} s; the records are complete without it."
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"The W&B mirror failed ({last}); the records are complete without it."
    return f"Mirrored {len(cells)} cells to W&B ({tracker['mode']}) in `{store.root}/wandb`."


def sync(store: Store) -> str:
    """Upload the offline runs of a sweep.

    Raises:
        VitsweepError: there are none, or W&B refuses.
    """
    runs = sorted(str(path) for path in (store.root / "wandb").glob("offline-run-*"))
    if not runs:
        raise VitsweepError(
            f"`{store.root}` holds no offline W&B runs: measure with `tracker=wandb` first."
        )
    wandb = Path(sys.executable).with_name("wandb")
    done = subprocess.run(
        [str(wandb), "sync", *runs], capture_output=True, text=True, timeout=SYNC_LIMIT_S
    )
    if done.returncode:
        raise VitsweepError(f"`wandb sync` failed: {done.stderr.strip().splitlines()[-1]}")
    return f"Uploaded {len(runs)} W&B runs."


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what JSON has: missing values of any kind become null."""
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
    """Return the measured columns of a row that hold a number."""
    return {m: row[m] for m in METRICS if isinstance(row.get(m), (int, float))}
