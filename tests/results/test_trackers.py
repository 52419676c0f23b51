"""The W&B mirror holds the numbers of the records, and costs nothing when it fails."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vitsweep
from tests.command import Command
from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import FLAGS, METRICS
from vitsweep.results.store import Store
from vitsweep.results.trackers import check_tracker, mirror

CELL = ("sweep.baseline=null", "measurement.blocks=2")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A cell that was measured with `tracker=wandb`."""
    command = Command(tmp_path_factory.mktemp("measured"))
    done = command("tracker=wandb", *CELL)
    assert done.returncode == 0, done.stderr
    assert "Mirrored 1 cells to W&B (offline)" in done.stdout
    return command


@pytest.mark.slow
def test_an_offline_run_read_back_equals_the_record(measured: Command) -> None:
    records = list(measured.store.runs())
    row = measured.cells().iloc[0]
    history, summary, run, config = read_back(measured.store.root)
    assert (run.display_name, list(run.tags)) == ("vit_nano", [])
    for column in ("device", "torch", "git_commit", "started_at"):
        assert config[column] == row[column]
    assert config["precision"] == "fp32"
    assert (summary["status"], summary["blocks"]) == ("measured", row["blocks"])
    assert summary["flags"] == [flag for flag in FLAGS if row.get(flag) in (True,)]
    logged = sorted(step["step_time_ms"] for step in history)
    assert logged == sorted(record.metrics["step_time_ms"] for record in records)
    for column in set(METRICS) & set(row.dropna().index):
        assert summary[column] == pytest.approx(row[column])
    [written] = measured.store.root.glob("wandb/offline-run-*/*.wandb")
    [answer] = vitsweep.load(measured.store.root).answers()
    assert answer.encode() in written.read_bytes(), "the notes of the run"
    frozen = "".join(path.read_text() for path in measured.store.root.rglob("*.yaml"))
    assert "api_key" not in frozen.lower()


def test_a_tracker_that_hangs_is_given_up(tmp_path: Path) -> None:
    too_short = {"mode": "offline", "project": "p", "time_limit_s": 0.001}
    told = mirror(Store(tmp_path), [], too_short)
    assert "0.001 s" in told


def read_back(root: Path) -> tuple[list[dict[str, float]], dict[str, Any], Any, dict[str, Any]]:
    """Read the only offline run under `root` from W&B's own file."""
    from wandb.proto import wandb_internal_pb2

    (path,) = root.glob("wandb/offline-run-*/run-*.wandb")
    history: list[dict[str, float]] = []
    summary: dict[str, Any] = {}
    run: Any = None
    for data in messages(path.read_bytes()):
        message = wandb_internal_pb2.Record()
        message.ParseFromString(data)
        if message.WhichOneof("record_type") == "history":
            history.append(pairs(message.history.item))
        if message.WhichOneof("record_type") == "summary":
            summary |= pairs(message.summary.update)
        if message.WhichOneof("record_type") == "run":
            run = message.run
    return history, summary, run, pairs(run.config.update)


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


@pytest.mark.parametrize(
    ("tracker", "words"),
    [
        ({"mode": "tensorboard"}, "`tracker.mode=tensorboard`"),
        ({"mode": "offline", "time_limit_s": 0}, "`tracker.time_limit_s=0`"),
        ({"mode": "offline", "time_limit_s": "soon"}, "`tracker.time_limit_s=soon`"),
    ],
)
def test_a_tracker_that_cannot_work_is_refused_before_anything_runs(
    tracker: dict[str, object], words: str
) -> None:
    with pytest.raises(VitsweepError) as error:
        check_tracker(tracker)
    assert words in str(error.value)
