"""The W&B mirror holds the numbers of the records, and costs nothing when it fails."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import Command
from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import METRICS
from vitsweep.results.store import Store
from vitsweep.results.trackers import mirror, sync


@pytest.mark.slow
def test_an_offline_run_read_back_equals_the_record(vitsweep: Command) -> None:
    done = vitsweep("tracker=wandb", "sweep.baseline=null", "measurement.blocks=2")

    assert done.returncode == 0, done.stderr
    assert "Mirrored 1 cells to W&B (offline)" in done.stdout
    records = list(vitsweep.store.runs())
    row = vitsweep.cells().iloc[0]
    history, summary = read_back(vitsweep.store.root)
    logged = sorted(step["step_time_ms"] for step in history)
    assert logged == sorted(record.metrics["step_time_ms"] for record in records)
    for column in set(METRICS) & set(row.dropna().index):
        assert summary[column] == pytest.approx(row[column])
    frozen = "".join(path.read_text() for path in vitsweep.store.root.rglob("*.yaml"))
    assert "api_key" not in frozen.lower()


def test_a_tracker_that_hangs_is_given_up(tmp_path: Path) -> None:
    too_short = {"mode": "offline", "project": "p", "time_limit_s": 0.001}
    told = mirror(Store(tmp_path), [], too_short)
    assert "given up after 0.001 s; the records are complete without it" in told


def test_no_tracker_says_nothing(tmp_path: Path) -> None:
    assert mirror(Store(tmp_path), [], {"mode": "none"}) == ""


def test_syncing_without_runs_says_how_to_get_some(tmp_path: Path) -> None:
    with pytest.raises(VitsweepError, match="tracker=wandb"):
        sync(Store(tmp_path))


def read_back(root: Path) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Read the only offline run under `root` from W&B's own file."""
    from wandb.proto import wandb_internal_pb2

    (path,) = root.glob("wandb/offline-run-*/run-*.wandb")
    history: list[dict[str, float]] = []
    summary: dict[str, float] = {}
    for data in messages(path.read_bytes()):
        message = wandb_internal_pb2.Record()
        message.ParseFromString(data)
        if message.WhichOneof("record_type") == "history":
            history.append(pairs(message.history.item))
        if message.WhichOneof("record_type") == "summary":
            summary |= pairs(message.summary.update)
    return history, summary


def messages(log: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log (blocks of 32 KiB) behind W&B's seven-byte header."""
    place, parts = 7, b""
    while place + 7 <= len(log):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        parts += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def pairs(items: Any) -> dict[str, float]:
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
