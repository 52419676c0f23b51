"""The W&B mirror holds the numbers of the records, and costs nothing when it fails."""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import vitsweep
from tests.builders import run
from tests.canaries import PLANTED, plant
from tests.command import Command
from tests.sample_sweep import sweep
from tests.tables.test_names import of
from vitsweep import extras
from vitsweep.errors import VitsweepError
from vitsweep.extras.mirror.tracker import named_rows
from vitsweep.extras.mirror.wandb_runs import (
    LONGEST_TAG,
    WANDB_CONFIG,
    _plain,
    check_tracker,
    metrics_of,
    mirror,
    write_runs,
)
from vitsweep.results.metrics import FLAGS, METRICS
from vitsweep.results.record import Status
from vitsweep.results.store import Store

CELL = ("sweep.baseline=null", "measurement.blocks=2")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """A cell that was measured with `tracker=wandb`, in a folder that should not be imported from."""
    command = Command(tmp_path_factory.mktemp("measured"))
    canary = plant(command.folder)
    running = command.start("tracker=wandb", "tracker.time_limit_s=500", *CELL, python=["-P"])
    out, error = running.communicate(timeout=300)
    assert running.returncode == 0, error
    assert "Mirrored 1 cell to W&B (offline)" in out
    assert not canary.exists(), canary.read_text()
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
    logs = written.parent.glob("logs/*.log")
    assert not any(PLANTED.encode() in path.read_bytes() for path in (written, *logs))
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
        ({"mode": "offline", "time_limit_s": True}, "`tracker.time_limit_s=True`"),
        ({"mode": "online", "time_limit_s": 86_401}, "`tracker.time_limit_s=86401`"),
        ({"mode": "online", "time_limit_s": 1, "project": " "}, "`tracker.project= `"),
        ({"mode": "online", "time_limit_s": 1, "project": "a\n"}, "`tracker.project=a\n`"),
        ({"mode": "online", "time_limit_s": 1, "project": 3}, "`tracker.project=3`"),
    ],
)
def test_a_tracker_that_cannot_work_is_refused_before_anything_runs(
    tracker: dict[str, object], words: str
) -> None:
    with pytest.raises(VitsweepError) as error:
        check_tracker(tracker)
    assert words in str(error.value)


def test_a_tracker_that_can_work_is_taken() -> None:
    for tracker in (
        {"mode": "offline", "time_limit_s": 0.5},
        {"mode": "online", "time_limit_s": 86_400, "project": "a b"},
    ):  # fmt: skip
        check_tracker(tracker)


def test_values_of_a_row_are_those_of_json() -> None:
    row = {
        "text": "a", "whole": 3, "yes": True, "none": None, "half": np.float32(0.5), "nan": math.nan,
        "inf": math.inf, "lost": pd.NA, "never": pd.NaT, "day": pd.Timestamp("2026-10-20"),
        "list": [1, math.nan, ("b", np.int64(2))], 7: Path("x/y"),
    }  # fmt: skip
    assert _plain(row) == {
        "text": "a", "whole": 3, "yes": True, "none": None, "half": 0.5, "nan": None, "inf": None,
        "lost": None, "never": None, "day": "2026-10-20 00:00:00", "list": [1, None, ["b", 2.0]],
        "7": "x/y",
    }  # fmt: skip


def test_a_ratio_without_its_interval_is_no_metric() -> None:
    row = {"speedup": 1.5, "step_time_ms": 2, "mfu": None, "loss_last": "x", "sharding": 3}
    plain = {"step_time_ms": 2}
    assert metrics_of(row) == plain
    assert metrics_of(row | {"claim": "faster", "speedup_low": None}) == plain
    known = {"claim": "faster", "speedup_low": 1.4}
    assert metrics_of(row | known) == plain | {"speedup": 1.5, "speedup_low": 1.4}
    assert metrics_of(row | {"claim": "baseline", "speedup": 1.0}) == plain | {"speedup": 1.0}


class Wandb:
    """Stands in for W&B, whose process takes seconds to start; another test has the real one."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {"steps": []}
        self.summary = self
        self.Settings = dict

    def init(self, **settings: Any) -> "Wandb":
        self.told |= settings
        return self

    def define_metric(self, name: str, summary: str) -> None:
        self.told[name] = summary

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.told["steps"].append((step, metrics))

    def update(self, row: dict[str, Any]) -> None:
        self.told["row"] = row

    def finish(self) -> None:
        self.told["finished"] = True


def test_a_cell_is_a_run_with_its_spec_its_measured_runs_and_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "s").create()
    for block, status in enumerate((Status.measured, Status.failed, Status.measured)):
        metrics = {"mfu": None, "loss_last": float(block)}
        store.save_run(
            run("c", f"b{block}", 64.0, status, metrics=metrics, minute=block, seed=block)
        )
    row = {"cell_id": "c", "claim": "faster", "speedup": 2.0, "speedup_low": 1.9, "device": "d",
           "throttled": True, "drifting": False, "blocks": "", "status": None}  # fmt: skip

    def told(row: dict[str, Any], mode: str, answers: list[str]) -> dict[str, Any]:
        wandb = Wandb()
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        tracker = {"mode": mode, "project": "p"}
        write_runs({"root": str(store.root), "sweep": "s", "tracker": tracker, "cells": [row],
                    "answers": answers})  # fmt: skip
        return wandb.told

    found = told(row, "offline", [])
    assert (found["id"], found["name"], found["group"], found["project"]) == ("s-c", "c", "s", "p")
    assert (found["resume"], found["notes"], found["tags"], found["mode"]) == (
        None, None, [], "offline"
    )  # fmt: skip
    assert found["dir"] == str(store.root)
    assert (found["save_code"], found["finished"], found["*"]) == (False, True, "none")
    assert found["settings"] == {"disable_git": True, "x_disable_stats": True, "console": "off"}
    assert (found["config"]["seed"], found["config"]["device"]) == (2, "d")
    assert [(step, metrics["loss_last"]) for step, metrics in found["steps"]] == [
        (0, 0.0),
        (1, 2.0),
    ]
    assert all("mfu" not in metrics for _, metrics in found["steps"])
    assert found["row"] == {
        "speedup": 2.0,
        "speedup_low": 1.9,
        "claim": "faster",
        "flags": ["throttled"],
    }

    more = {"name": "mine", "tags": ["x" * 100, "y"], "cell_id": "nowhere", "device": "d"}
    found = told(more, "online", ["One.", "Two."])
    assert (found["resume"], found["notes"], found["name"]) == ("allow", "One.\nTwo.", "mine")
    assert [len(tag) for tag in found["tags"]] == [LONGEST_TAG, 1]
    assert set(found["config"]) == set(WANDB_CONFIG)
    assert (found["steps"], found["row"]) == ([], {"flags": []})


def test_a_mirror_that_fails_names_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    ends = iter([(1, "one\ntwo\n"), (2, " "), (0, "")])

    def captured(command: list[str], input: str, timeout: float, cwd: str, env: Any) -> Any:
        asked.append(json.loads(input) | {"timeout": timeout})
        assert "-P" in command
        assert list(Path(cwd).iterdir()) == []
        assert "WANDB_DIR" not in env
        code, error = next(ends)
        return SimpleNamespace(returncode=code, stderr=error)

    monkeypatch.setattr("vitsweep.extras.mirror.wandb_runs.captured", captured)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    rows = [{"status": "measured", "cell_id": "a", "mfu": math.nan}, {"status": "failed"}, {}]
    tracker = {"mode": "offline", "time_limit_s": 7}
    for told in ("(two)", "(no reason given)", " 1 cell "):
        assert told in mirror(Store(tmp_path), rows, tracker, ["A."])
    assert asked[0]["cells"] == [{"status": "measured", "cell_id": "a", "mfu": None}]
    assert (asked[0]["answers"], asked[0]["timeout"], asked[0]["tracker"]) == (["A."], 7.0, tracker)


def test_copies_for_trackers() -> None:
    tables = sweep("speedups")
    for row in tables.cells.to_dict("records"):
        found = metrics_of({k: v for k, v in row.items() if v == v})
        assert ("speedup_low" in found) == ("speedup" in found) or row["claim"] == "baseline"
    alone = {"speedup": 1.8, "claim": "screened", "images_per_second": 9.0}
    assert metrics_of(alone) == {"images_per_second": 9.0}


def test_a_tracker_gets_name_baseline_and_choices() -> None:
    rows = named_rows(of(a={}, b={"precision": "O1"}))
    assert [row["name"] for row in rows] == ["baseline", "O1"]
    assert [row["baseline"] for row in rows] == ["baseline"] * 2
    assert [row["tags"] for row in rows] == [["precision=fp32"], ["precision=O1"]]
    assert {row["baseline"] for row in named_rows(of("gone", a={}))} == {""}


@pytest.mark.smoke
def test_the_core_gets_a_function_of_cells(tmp_path: Path) -> None:
    for off in (None, {}, {"mode": "none", "time_limit_s": -1}):
        assert extras.tracker(off) is None
    with pytest.raises(VitsweepError, match=r"`tracker\.mode=foo`"):
        extras.tracker({"mode": "foo"})
    mirrored = extras.tracker({"mode": "offline", "project": "p", "time_limit_s": 0.001})
    assert "0.001 s" in mirrored(Store(tmp_path), of(a={}), ["A."])
