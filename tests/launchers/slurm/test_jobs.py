"""What the events of a job say of it."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from vitsweep.errors import VitsweepError
from vitsweep.execution.run_request import Run
from vitsweep.launchers.slurm.state.jobs import (
    ArrayJob,
    JobArray,
    JobEvents,
    Work,
    cells_submitted_since,
)

START = {"event": "job_start", "restart": 0, "time": 10.0}
DONE = {"event": "job_end", "cause": "done", "time": 20.0}
REQUEUED = {"event": "job_end", "cause": "preempted", "requeued": True, "time": 21.0}
RECONCILED = {"event": "reconciled", "time": 30.0}


def run_start(name: str) -> dict[str, Any]:
    return {"event": "run_start", "run": name, "time": 11.0}


def run_end(name: str, will_repeat: bool = False, **more: Any) -> dict[str, Any]:
    end = {"event": "run_end", "run": name, "status": "measured", "time": 12.0}
    return end | {"will_repeat": will_repeat} | more


def test_the_state_of_a_job_follows_from_its_last_events() -> None:
    for events, has_ended, is_done, reconciled, restart, last_time in (
        ([], False, False, False, -1, 0),
        ([START], False, False, False, 0, 10.0),
        ([START, DONE], True, True, False, 0, 20.0),
        ([START, REQUEUED], False, False, False, 0, 21.0),
        ([START, REQUEUED, RECONCILED], True, False, True, 0, 21.0),
        ([START, DONE, START | {"restart": 2}], False, False, False, 2, 20.0),
        ([START, RECONCILED, START | {"restart": 1}], False, False, False, 1, 10.0),
        ([START, DONE | {"cause": "cancelled"}], True, False, False, 0, 20.0),
    ):
        found = JobEvents(events)
        assert (found.has_ended, found.is_done, found.reconciled) == (
            has_ended,
            is_done,
            reconciled,
        )
        assert (found.restart, found.last_time) == (restart, last_time)


def test_runs_that_dead_jobs_left_are_recorded_since_the_latest_start() -> None:
    later = RECONCILED | {"time": 40.0}
    for events, at in (
        ([], inf),
        ([START], inf),
        ([START, RECONCILED, later], 30.0),
        ([START, RECONCILED, START], inf),
        ([START, RECONCILED, START, later], 40.0),
    ):
        assert JobEvents(events).reconciled_at == at


def test_a_run_is_in_flight_until_it_ends() -> None:
    a, b = run_start("a"), run_start("b")
    for events, name in (
        ([], None), ([START], None), ([a], "a"), ([a, run_end("a")], None), ([a, run_end("a"), b], "b"),
    ):  # fmt: skip
        found = JobEvents(events).in_flight
        assert (found and found["run"]) == name


def test_attempts_of_a_run_are_counted_and_those_that_saved_more_steps() -> None:
    run = Run("b0", 0, "c", "a")
    saved = [run_end("a", True, saved_step=step) for step in (5, 5, 0, None, 9)]
    events = JobEvents(
        [run_start("a"), run_start("b"), run_start("a"), *saved, run_end("b", saved_step=7)]
    )
    assert (events.num_attempts(run), events.num_saved_attempts(run)) == (2, 2)
    assert JobEvents([]).num_attempts(run) == JobEvents([]).num_saved_attempts(run) == 0
    ends = JobEvents([run_end("a", True), run_end("b", status="failed"), run_end("a", status="x")])
    assert ends.final_statuses() == {"b": "failed", "a": "x"}
    assert JobEvents([run_end("a", True)]).final_statuses() == {}


def test_cells_that_other_jobs_have_are_skipped() -> None:
    runs = [Run("b0", 0, cell, f"b0-{cell}") for cell in "abc"]
    taken = JobEvents([{"event": "taken_over", "cells": ["a", "z"]}])
    assert taken.cells_to_skip(runs, {"b0-b": "measured"}) == {"a", "z"}
    assert taken.cells_to_skip(runs, {"b0-b": "diverged", "b0-c": "killed"}) == {"a", "b", "z"}


def array(folder: Path, line: object = None, **facts: Any) -> JobArray:
    folder.mkdir(parents=True)
    (folder / "array.json").write_text(json.dumps({"time": 5.0, "num_jobs": 1} | facts))
    (folder / "tasks.jsonl").write_text(json.dumps(line or {"blocks": []}) + "\n")
    return JobArray(folder)


def test_the_id_of_an_array_is_noted_found_or_of_its_events(tmp_path: Path) -> None:
    found = array(tmp_path / "a")
    assert found.slurm_id == ""
    assert JobArray(found.folder, "9").slurm_id == "9"
    (found.folder / "0.jsonl").write_text('{"event": "job_start"}\n{"array_id": "12"}\n')
    assert JobArray(found.folder).slurm_id == "12"
    (found.folder / "slurm_id").write_text("")
    assert JobArray(found.folder).slurm_id == "12"
    (found.folder / "slurm_id").write_text(" 345678901234\n")
    assert JobArray(found.folder).slurm_id == "345678901234"
    for text in ("1234567890123", "-1", "x", "1 2"):
        (found.folder / "slurm_id").write_text(text)
        with pytest.raises(VitsweepError, match=r"slurm_id` is damaged"):
            _ = JobArray(found.folder).slurm_id
    assert [found.owns(s) for s in ("/x/a/run.sh", "/x/b/run.sh", "", "a")] == [
        True,
        False,
        False,
        False,
    ]


def test_files_of_an_array_that_hold_something_else_are_damaged(tmp_path: Path) -> None:
    run = {"cell_id": "c", "run_id": "r"}
    good = {
        "blocks": [
            {"name": "x", "runs": [run, run | {"run_id": "s"}]},
            {"name": "y", "runs": [run]},
        ]
    }
    [job] = array(tmp_path / "good", good).jobs()
    assert job.runs() == [Run("x", 0, "c", "r"), Run("x", 1, "c", "s"), Run("y", 0, "c", "r")]
    for number, line in enumerate(
        (
            {"blocks": [{"name": "x", "runs": [run | {"cell_id": "../x"}]}]},
            {"blocks": [{"name": "x", "runs": [run | {"run_id": "a/b"}]}]},
            {"blocks": [{"runs": [run]}]},
            {"blocks": 3},
            {"no": 1},
        )
    ):
        [job] = array(tmp_path / str(number), line).jobs()
        with pytest.raises(VitsweepError, match="is damaged: line 1 "):
            job.runs()
    with pytest.raises(VitsweepError, match="1 of 2 lines"):
        list(array(tmp_path / "cut", num_jobs=2).jobs())
    with pytest.raises(VitsweepError, match="is damaged"):
        list(array(tmp_path / "list", [1]).jobs())


def test_a_job_runs_what_was_submitted_and_nothing_else(tmp_path: Path) -> None:
    found = array(tmp_path / "a")
    with pytest.raises(VitsweepError, match="No such file"):
        found.work("x")
    (found.folder / "key").write_text("secret")
    text = (found.folder / "tasks.jsonl").read_text()
    work = Work(text, "secret")
    assert found.work(work.digest) == work
    assert found.job(0, work) == ArrayJob(found, 0, {"blocks": []})
    with pytest.raises(VitsweepError, match=r"`tasks\.jsonl` or `key`"):
        found.work(Work(text, "other").digest)


def test_events_are_read_again_where_there_are_more(tmp_path: Path) -> None:
    [job] = array(tmp_path / "jobs" / "a").jobs()
    assert (job.events().events, job.events().num_bytes) == ([], 0)
    job.events_path.write_text(json.dumps(START) + "\n")
    first = job.events()
    assert job.events(first) is first
    with job.events_path.open("a") as file:
        for event in (
            DONE, {"event": "job_end"}, {"event": "run_start"}, {"event": "heartbeat", "time": "x"},
            {"time": 1},
            {"event": "run_end", "run": "a", "status": "x"}, {"event": "job_start", "restart": "0"},
            {"event": "of_a_later_version", "more": 1},
        ):  # fmt: skip
            file.write(json.dumps(event) + "\n")
    assert job.events(first).events == [START, DONE, {"event": "of_a_later_version", "more": 1}]


def test_cells_of_arrays_that_were_submitted_later(store) -> None:
    """The array of the sweep was submitted now."""
    [own] = [JobArray(path.parent) for path in store.root.glob("jobs/*/array.json")]
    when, cells = own.facts["time"], {run.cell_id for job in own.jobs() for run in job.runs()}
    assert len(cells) == 2
    for since, found in ((when - 1, cells), (when, set()), (when + 1, set())):
        assert cells_submitted_since(store, since) == found
