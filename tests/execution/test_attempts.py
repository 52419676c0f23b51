"""Attempts at runs by the lines of their file: which are known, which run, which were left unfinished."""

import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.builders import run
from tests.cells import cell
from vitsweep import files
from vitsweep.execution.attempts import append_start, attempts, unfinished
from vitsweep.execution.outcome import RECORD_DRAFT
from vitsweep.execution.run_request import RunRequest, attempt_folder
from vitsweep.files import append_line
from vitsweep.results.store import Store

START = {"event": "start", "run_id": "b-1", "attempt": 1}


def store_of(folder: Path, *lines: dict[str, Any]) -> Store:
    folder.mkdir(parents=True, exist_ok=True)
    for line in lines:
        append_line(Store(folder).cell("c") / "attempts.jsonl", line)
    return Store(folder)


def test_an_attempt_is_what_its_two_lines_say(tmp_path: Path) -> None:
    told = {
        "name": "b-1",
        "block": "b",
        "position": 3,
        "node": "n",
        "job": "7",
        "pid": 5,
        "time": 2.5,
    }
    store = store_of(
        tmp_path,
        START,
        START | told | {"run_id": "b-1-2", "attempt": 2, "code_hash": "h"},
        {"event": "end", "run_id": "b-1-2", "exit_codes": [0, None], "saved_step": 8},
        {"event": "warm_up", "run_id": "b-1"},
    )
    bare, full = attempts(store, "c")
    assert (bare.run.name, bare.run.block, bare.run.position, bare.number) == ("b-1", "", 0, 1)
    assert (bare.node, bare.job, bare.pid, bare.started_at, bare.code_hash) == (
        "",
        None,
        None,
        0.0,
        None,
    )
    assert (bare.exit_codes, bare.saved_step, bare.has_ended) == (None, None, False)
    assert (full.run.name, full.run.block, full.run.position, full.number) == ("b-1", "b", 3, 2)
    assert (full.run_id, full.run.cell_id) == ("b-1-2", "c")
    assert (full.node, full.job, full.pid, full.started_at, full.code_hash) == (
        "n",
        "7",
        5,
        2.5,
        "h",
    )
    assert (full.exit_codes, full.saved_step, full.has_ended) == ((0, None), 8, True)


def test_lines_of_other_types_are_of_no_attempt(tmp_path: Path) -> None:
    for wrong in (
        {"event": "end"}, {"run_id": "../b"}, {"name": "../b"}, {"run_id": 1}, {"block": 1},
        {"attempt": "1"}, {"position": None}, {"pid": "5"}, {"time": "now"}, {"code_hash": 1},
        {"node": None}, {"saved_step": 1.5}, {"pid": -1}, {"pid": 2**22 + 1},
    ):  # fmt: skip
        assert attempts(store_of(tmp_path / str(wrong)[2:9], START | wrong), "c") == [], wrong
    no_number = {"event": "start", "run_id": "b-1"}
    assert attempts(store_of(tmp_path / "number", no_number), "c") == []
    for wrong_codes in (0, [[0]], ["0"]):
        end = {"event": "end", "run_id": "b-1", "exit_codes": wrong_codes}
        [found] = attempts(store_of(tmp_path / f"end {wrong_codes}", START, end), "c")
        assert not found.has_ended


def test_an_attempt_runs_while_the_process_that_began_it_lives(tmp_path: Path) -> None:
    began = psutil.Process().create_time()
    store = store_of(
        tmp_path,
        *(START | {"pid": os.getpid(), "time": began + late} for late in (1.0, 0.0, -1.0)),
        START | {"pid": 2**22 - 1, "time": began},
    )
    found = [attempt.is_running for attempt in attempts(store, "c")]
    assert found == [True, True, False, False], "a process that began later has a pid used again"


def test_a_run_is_unfinished_where_it_has_neither_record_nor_successor(tmp_path: Path) -> None:
    here = START | {"pid": 5, "node": socket.gethostname(), "time": time.time(), "name": "b-1"}
    for number, (changed, more, expected) in enumerate([
        ({}, [], ["b-1"]),
        ({"pid": None}, [], []),
        ({"job": "7"}, [], []),
        ({"node": "elsewhere"}, [], []),
        ({}, [{"event": "end", "run_id": "b-1", "exit_codes": [0, 0]}], []),
        ({}, [{"event": "end", "run_id": "b-1", "exit_codes": [75], "saved_step": 8}], []),
        ({}, [here | {"run_id": "b-1-2", "attempt": 2}], ["b-1", "b-1-2"]),
        ({}, [here | {"run_id": "a-1", "name": "a-1"}], ["b-1", "a-1"]),
    ]):  # fmt: skip
        store = store_of(tmp_path / str(number), here | changed, *more)
        assert [a.run_id for a in unfinished(store, "c")] == expected, (changed, more)
    store = store_of(tmp_path / "recorded", here)
    store.publish(replace(run("c"), run_id="b-1"))
    assert unfinished(store, "c") == []


@pytest.mark.parametrize(("codes", "counts"), [([0, 0], True), ([0, 1], False), ([], False)])
def test_a_record_that_was_left_counts_where_all_ranks_ended_well(
    tmp_path: Path, codes: list[int], counts: bool
) -> None:
    here = START | {"pid": 5, "node": socket.gethostname()}
    store = store_of(tmp_path, here, {"event": "end", "run_id": "b-1", "exit_codes": codes})
    assert unfinished(store, "c") == []
    folder = attempt_folder(store.cell("c"), "b-1", 1)
    folder.mkdir(parents=True)
    (folder / RECORD_DRAFT).write_text("{}")
    assert [a.run_id for a in unfinished(store, "c")] == ["b-1"] * counts
    other = START | {"run_id": "a-1", "pid": 5, "node": socket.gethostname()}
    store_of(tmp_path, other, {"event": "end", "run_id": "a-1", "exit_codes": [0]})
    assert [a.run_id for a in unfinished(store, "c")] == ["b-1"] * counts


def test_a_power_cut_leaves_what_finds_the_checkpoints_of_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    where = lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: E731
    monkeypatch.setattr(files.os, "fsync", where)
    request = RunRequest(sweep_folder=tmp_path, cell_id="c", run_id="b-1", block="b", position=0)
    append_start(request, cell())
    assert synced == []
    append_start(request, cell("task=train", "task.epochs=1"))
    of_cell = tmp_path / "cells" / "c"
    assert synced[:2] == [str(of_cell / "attempts.jsonl"), str(of_cell)]
