"""A run whose command was killed has a row: `killed`, never `waiting`."""

import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run
from tests.cells import entry
from vitsweep.cli.retry import retries
from vitsweep.errors import VitsweepError
from vitsweep.execution.attempts import KILLED, record_unfinished
from vitsweep.execution.outcome import RECORD_DRAFT
from vitsweep.execution.run_request import attempt_folder, frozen_document
from vitsweep.files import append_line
from vitsweep.results.store import Store

CODE = {"git_commit": "c", "git_dirty": False, "git_diff": "", "packages": {}}


@pytest.fixture
def ended_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "s").create()
    cell = entry("sharding=ddp")
    store.freeze(cell.cell_id, frozen_document(cell.spec, cell.tree, (), CODE))
    return store


def started(store: Store, pid: int, **facts: Any) -> str:
    [folder] = store.cells.iterdir()
    event = {"event": "start", "run_id": "b-1", "name": "b-1", "attempt": 1, "job": None}
    place = {"block": "b", "position": 0, "node": socket.gethostname()}
    append_line(
        folder / "attempts.jsonl", event | place | {"pid": pid, "time": time.time()} | facts
    )
    return folder.name


def rows(store: Store, cell_id: str) -> list[tuple[str, str, str]]:
    record_unfinished(store, [cell_id])
    record_unfinished(store, [cell_id])  # again: nothing is recorded twice
    return [(r.run_id, str(r.status), r.reason) for r in store.runs()]


def test_a_run_whose_command_was_killed_is_recorded_once(store, ended_pid, capsys):
    cell_id = started(store, ended_pid)
    show = import_module("vitsweep.cli.status").run
    assert show([str(store.root)]) == 3
    assert f"killed: {KILLED}" in " ".join(capsys.readouterr().out.split())
    assert rows(store, cell_id) == [("b-1-unfinished", "killed", KILLED)]


def test_collect_tells_of_a_run_whose_command_was_killed_and_records_it_when_asked(
    store, ended_pid, capsys
):
    cell_id = started(store, ended_pid)
    collect = import_module("vitsweep.cli.collect").run
    assert collect([str(store.root)]) == 0
    assert re.search("1 cell .*--reconcile`", " ".join(capsys.readouterr().out.split()))
    assert not list(store.runs())
    with store.lock():
        assert collect([str(store.root), "--reconcile"]) == 0
    assert not list(store.runs()), "a command is at work on the sweep"
    capsys.readouterr()
    assert collect([str(store.root), "--reconcile"]) == 0
    assert [(r.cell_id, r.status, r.reason) for r in store.runs()] == [(cell_id, "killed", KILLED)]
    assert "--reconcile`" not in capsys.readouterr().out


def test_retry_finds_a_run_whose_command_was_killed(store, ended_pid):
    started(store, ended_pid)
    store.append_command({"command": "python -m vitsweep", "cells": [], "baselines": {}})
    assert len(retries([str(store.root), "--status", "killed"])) == 1


def test_a_run_in_progress_is_shown_as_running_and_not_recorded(store, capsys):
    cell_id = started(store, os.getpid())
    import_module("vitsweep.cli.status").run([str(store.root)])
    assert "running 1" in capsys.readouterr().out
    assert rows(store, cell_id) == []


@pytest.mark.parametrize("facts", [{"job": "7_0"}, {"node": "elsewhere"}])
def test_runs_of_jobs_and_of_other_machines_are_left_alone(store, ended_pid, facts):
    assert rows(store, started(store, ended_pid, **facts)) == []


def test_a_run_that_ended_or_whose_training_is_saved_is_left_alone(store, ended_pid):
    cell_id = started(store, ended_pid)
    path = store.cell(cell_id) / "attempts.jsonl"
    append_line(path, {"event": "end", "run_id": "b-1", "saved_step": 8})
    assert rows(store, cell_id) == []
    started(store, ended_pid, run_id="b-1-2", attempt=2)
    assert rows(store, cell_id) == [], "its training continues"


def test_a_measurement_whose_command_was_killed_before_it_was_recorded_counts(store, ended_pid):
    cell_id = started(store, ended_pid)
    cell = store.cell(cell_id)
    append_line(cell / "attempts.jsonl", {"event": "end", "run_id": "b-1", "exit_codes": [0, 0]})
    measured = replace(run(cell_id, block="b"), run_id="b-1")
    folder = attempt_folder(cell, "b-1", 1)
    folder.mkdir(parents=True)
    (folder / RECORD_DRAFT).write_text(measured.to_json())
    assert rows(store, cell_id) == [("b-1", "measured", "")]


@pytest.mark.parametrize("place", ["start", "draft"])
def test_a_run_id_that_leads_out_of_the_folder_is_none(store, ended_pid, tmp_path, place):
    (tmp_path / "settings.json").write_text("mine")
    cell_id, outside = started(store, ended_pid), "../../../../settings"
    folder = attempt_folder(store.cell(cell_id), "b-1", 1)
    append_line(folder.parent.parent / "attempts.jsonl", {"event": "end", "run_id": "b-1"})
    if place == "start":
        for ids in ({"run_id": outside}, {"name": outside, "run_id": "b-2"}):
            started(store, ended_pid, **ids)
    else:
        end = {"event": "end", "run_id": "b-1", "exit_codes": [0, 0]}
        append_line(store.cell(cell_id) / "attempts.jsonl", end)
        folder.mkdir(parents=True)
        draft = replace(run(cell_id, block="b"), run_id=outside).to_json()
        (folder / RECORD_DRAFT).write_text(draft)
    statuses = [status for _, status, _ in rows(store, cell_id)]
    assert statuses == (["failed"] if place == "draft" else [])
    assert [path.name for path in tmp_path.glob("*.json")] == ["settings.json"]
    assert (tmp_path / "settings.json").read_text() == "mine"
    with pytest.raises(VitsweepError, match=re.escape(repr(outside))):
        store.save_run(replace(run(cell_id), run_id=outside))


def test_a_record_that_somebody_deleted_is_no_failure(store, ended_pid):
    cell_id = started(store, ended_pid)
    end = {"event": "end", "run_id": "b-1", "exit_codes": [0, 0]}
    append_line(store.cell(cell_id) / "attempts.jsonl", end)
    assert rows(store, cell_id) == []
