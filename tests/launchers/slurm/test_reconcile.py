"""Records for jobs that died, from their events and from what Slurm says, without a cluster."""

import errno
import io
import json
import multiprocessing
import os
import re
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from tests.builders import run as measured_run
from tests.launchers.slurm.fabricated import SCRIPT, START, first_run_start, rows, write_events
from vitsweep.cli import VERBS
from vitsweep.cli.pack import pack_ended
from vitsweep.errors import VitsweepError
from vitsweep.execution.outcome import RECORD_DRAFT, RunFailure, publish
from vitsweep.execution.run_request import RunRequest, attempt_folder
from vitsweep.execution.runner import Runner
from vitsweep.files import SweepGoneError, append_line
from vitsweep.launchers.nodes.transport import LOOPBACK, Nodes
from vitsweep.launchers.slurm import commands
from vitsweep.launchers.slurm.commands import SlurmJob
from vitsweep.launchers.slurm.node import coordinator
from vitsweep.launchers.slurm.node.coordinator import JobEventWriter, JobLoop
from vitsweep.launchers.slurm.state import poll, status
from vitsweep.launchers.slurm.state.jobs import ArrayJob, JobArray, JobEvents, Run, job_arrays
from vitsweep.launchers.slurm.state.poll import pending_runs, reconcile, wait_for_records
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.tables.load import cells_of


@pytest.mark.parametrize(
    ("job", "status", "reason"),
    [
        (None, "killed", "`sacct -j 7_0`"),
        (SlurmJob(state="CANCELLED", reason="by 0"), "killed", "ended as CANCELLED (by 0)"),
        (SlurmJob(state="TIMEOUT", reason="TimeLimit"), "timed_out", "TIMEOUT"),
        (SlurmJob(state="PREEMPTED"), "preempted", "PREEMPTED"),
        (SlurmJob(state="NODE_FAIL"), "killed", "NODE_FAIL"),
        (SlurmJob(state="OUT_OF_MEMORY"), "out_of_memory", "OUT_OF_MEMORY"),
        (SlurmJob(state="FAILED", exit_code=errno.ENOSPC), "killed", os.strerror(errno.ENOSPC)),
        (SlurmJob(state="FAILED", exit_code=1), "killed", "with exit code 1"),
    ],
)
def test_every_cell_of_a_dead_job_has_a_row(store, slurm, job, status, reason):
    write_events(store, START, first_run_start(store))
    slurm |= {"7_0": job} if job else {}
    reconcile(store)
    assert [found for found, _ in rows(store)] == [status, status]
    assert all(reason in found for _, found in rows(store))
    reconcile(store)
    assert len(rows(store)) == 2


def test_a_job_that_wrote_before_the_clock_was_set_back_is_silent_like_any_other(store, slurm):
    write_events(store, START | {"time": time.time() + 86400})
    assert [state.state for state in poll.poll(store)] == ["gone"]


def test_an_exit_code_comes_with_the_log_that_tells_why(store, slurm):
    write_events(store, START, first_run_start(store))
    slurm["7_0"] = SlurmJob(state="FAILED", exit_code=2)
    log = store.root / "jobs" / "a" / "7_0_0_log.out"
    log.write_text("python: No such file")
    reconcile(store)
    assert all(re.search(rf"exit code 2\b.* `{log}`\.$", reason) for _, reason in rows(store))


def test_a_job_that_was_cancelled_while_pending_says_so(store, slurm):
    slurm["7_0"] = SlurmJob(state="CANCELLED", reason="by 0")
    reconcile(store)
    assert [re.sub(" .*cancelled.*", "", reason) for _, reason in rows(store)] == ["Job"] * 2
    assert all(found == ("killed", found[1]) and "7_0" in found[1] for found in rows(store))


@pytest.mark.parametrize(("restarts", "released"), [(1, ["7_0"]), (4, [])])
def test_a_job_whose_launch_failed_is_released_a_few_times(
    store, slurm, monkeypatch, restarts, released
):
    found: list[str] = []
    monkeypatch.setattr("vitsweep.launchers.slurm.state.poll.release", found.append)
    held = "launch failed requeued held"
    slurm["7_0"] = SlurmJob(state="PENDING", reason=held, restarts=restarts, script=SCRIPT)
    [state] = reconcile(store)
    assert (state.state, found, rows(store)) == ("waiting", released, [])


def test_a_job_in_the_queue_is_left_alone(store, slurm):
    write_events(store, START, first_run_start(store))
    slurm["7_0"] = SlurmJob(state="REQUEUED")
    [state] = reconcile(store)
    assert state.is_live
    assert len({run.cell_id for run in pending_runs([state])}) == len(pending_runs([state])) == 2
    assert rows(store) == []


def test_nothing_is_concluded_while_slurm_is_silent(store, slurm):
    write_events(store, START, first_run_start(store))
    slurm["silent"] = None
    [state] = reconcile(store)
    assert (state.state, rows(store)) == ("unknown", [])


def test_the_reason_that_a_job_wrote_is_recorded(store, slurm):
    write_events(
        store,
        START,
        {"event": "job_end", "cause": "not started", "reason": "No connection from n2."},
    )
    reconcile(store)
    assert {reason.partition(": ")[2] for _, reason in rows(store)} == {"No connection from n2."}


def test_a_requeued_job_is_not_dead(store, slurm):
    write_events(
        store, START, {"event": "job_end", "cause": "preempted", "reason": "", "requeued": True}
    )
    slurm["7_0"] = SlurmJob(state="PENDING", reason="BeginTime")
    [state] = reconcile(store)
    assert state.state == "waiting"


CANCELLED = {"event": "job_end", "restart": 0, "cause": "cancelled", "reason": ""}


@pytest.mark.parametrize("after", [[], [CANCELLED], [CANCELLED, {"event": "reconciled"}]])
def test_a_job_that_slurm_has_requeued_is_open_whatever_it_wrote(store, slurm, after):
    write_events(store, START, first_run_start(store), *after)
    slurm["7_0"] = SlurmJob(state="PENDING", reason="BeginTime", restarts=1)
    [state] = reconcile(store)
    assert (state.state, rows(store)) == ("waiting", [])


def test_a_job_that_is_about_to_leave_slurm_after_its_end_has_ended(store, slurm):
    write_events(store, START, CANCELLED)
    slurm["7_0"] = SlurmJob(state="COMPLETING", restarts=0)
    [state] = reconcile(store)
    assert state.state == "ended"


def test_a_measurement_that_arrives_after_a_job_was_taken_for_dead_counts(store, slurm):
    start = first_run_start(store)
    write_events(store, START, start)
    reconcile(store)
    [first] = [run for run in store.runs() if run.cell_id == start["cell_id"]]
    late = replace(first, run_id=start["run_id"], status=Status.measured, reason="")
    assert store.publish(late).status == "measured"
    statuses = cells_of(store).set_index("cell_id")["status"]
    assert statuses.pop(start["cell_id"]) == "measured"
    assert statuses.tolist() == ["killed"]


def leave_a_measurement(store: Store, start: dict[str, Any]) -> None:
    """All ranks of a run end well, and its supervisor dies before it publishes their record."""
    cell, run_id = store.cell(start["cell_id"]), start["run_id"]
    for event in ({"event": "start", "attempt": 1}, {"event": "end", "exit_codes": [0, 0]}):
        append_line(cell / "attempts.jsonl", event | {"run_id": run_id})
    draft = attempt_folder(cell, run_id, 1) / RECORD_DRAFT
    draft.parent.mkdir(parents=True)
    record = replace(measured_run(start["cell_id"], block="b"), run_id=run_id)
    draft.write_text(record.to_json())


def test_a_measurement_that_a_dead_job_left_unpublished_counts(store, slurm):
    start = first_run_start(store)
    write_events(store, START, start)
    leave_a_measurement(store, start)
    slurm["7_0"] = SlurmJob(state="NODE_FAIL")
    reconcile(store)
    [run] = [run for run in store.runs() if run.cell_id == start["cell_id"]]
    assert (run.run_id, run.status) == (start["run_id"], "measured")


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_restarted_job_records_the_run_that_its_earlier_start_left(store, is_measured):
    start = first_run_start(store)
    write_events(store, START, start)
    if is_measured:
        leave_a_measurement(store, start)
    [job] = JobArray(store.root / "jobs" / "a").jobs()
    loop = restarted(job, store)
    loop.record_orphan()
    [run] = store.runs()
    assert run.run_id == start["run_id"]
    assert run.status == ("measured" if is_measured else "killed")
    left = [run.cell_id for run in loop.event_log.remaining_runs]
    assert (start["cell_id"] in left) == (not is_measured)


def test_a_job_that_comes_back_leaves_what_was_submitted_anew_to_the_other_job(store, slurm):
    """Slurm may start a job again that it had listed as failed: its controller lost its state."""
    write_events(store, START, first_run_start(store))
    slurm["7_0"] = SlurmJob(state="FAILED", exit_code=137)
    reconcile(store)
    [job] = JobArray(store.root / "jobs" / "a").jobs()
    again, other = job.runs()
    submitted = store.root / "jobs" / "b"
    submitted.mkdir()
    facts = job.array.facts | {"time": time.time() + 1}
    (submitted / "array.json").write_text(json.dumps(facts))
    run = {"cell_id": again.cell_id, "run_id": "c-1"}
    (submitted / "tasks.jsonl").write_text(json.dumps({"blocks": [{"name": "c", "runs": [run]}]}))

    loop = restarted(job, store)
    loop.leave_cells_taken_over()
    assert loop.event_log.remaining_runs == [other]
    write_events(store, START | {"restart": 1})
    slurm["7_0"] = SlurmJob(state="RUNNING", restarts=1)
    found = {state.job.array.folder.name: state for state in poll.poll(store)}
    assert pending_runs([found["a"]]) == [other], "others see what it still does"
    assert restarted(job, store).event_log.remaining_runs == [other], "so does a third start"


@pytest.mark.parametrize("ended", [Status.measured, Status.failed])
def test_a_run_that_was_measured_before_its_node_was_lost_is_not_repeated(
    store, slurm, monkeypatch, ended
):
    [job] = JobArray(store.root / "jobs" / "a").jobs()
    loop = restarted(job, store)
    monkeypatch.setattr(loop.runner, "attempt", partial(ends, store, ended))
    loop.nodes.all[0].lost = "n1: its agent ended or the node died"
    run, cell = next(loop.coming())
    loop.attempt(loop.request(run, cell), cell)
    [end] = job.events().of_kind("run_end")
    assert (end["status"], end["will_repeat"]) == (str(ended), ended is Status.failed)


LIVING: list[Any] = []
"""Connections of agents: one that is closed is a node that is lost."""


def restarted(job: ArrayJob, store: Store) -> JobLoop:
    """The loop of the second start of a job, whose agents have connected."""
    job.array.facts["max_attempts"] = 3
    connection, agent = multiprocessing.Pipe()
    LIVING.append(agent)
    agents = [({"node": "n1", "address": LOOPBACK}, connection)]
    nodes = Nodes(agents, job.array.folder / "warm_up_0", {})
    return JobLoop(
        runner=Runner(store, nodes), job=job, event_log=JobEventWriter(job, 1), nodes=nodes
    )


def ends(store: Store, status: Status, request: RunRequest, cell: CellSpec) -> RunRecord:
    """Record an attempt that ended so, without its ranks."""
    return publish(request, cell, RunFailure(status, "no"))


def test_a_job_with_a_recent_event_is_alive_although_slurm_does_not_list_it(store, slurm):
    write_events(store, START, first_run_start(store) | {"time": time.time() - 60})
    [state] = reconcile(store)
    assert (state.state, rows(store)) == ("running", [])
    [path] = store.root.glob("jobs/*/0.jsonl")
    path.unlink()
    write_events(store, START, first_run_start(store) | {"time": time.time() - 600})
    [state] = reconcile(store)
    assert (state.state, len(rows(store))) == ("gone", 2)


def test_nothing_is_concluded_about_jobs_of_another_cluster(store, slurm, monkeypatch):
    array = store.root / "jobs" / "a" / "array.json"
    array.write_text(json.dumps(json.loads(array.read_text()) | {"cluster": "other"}))
    monkeypatch.setattr(poll, "controller_settings", lambda: {"ClusterName": "here"})
    slurm["7_0"] = SlurmJob(state="COMPLETED")  # a job of this cluster with the same id
    [state] = reconcile(store)
    assert (state.state, rows(store)) == ("unknown", [])


class Clock:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    time = staticmethod(time.time)


def test_a_hundred_waiting_commands_ask_slurm_less_than_ten_things_a_second(
    store, slurm, monkeypatch
):
    clock, asked = Clock(), []
    for module in (poll, status):
        monkeypatch.setattr(module, "time", clock)
    answer = poll.squeue
    monkeypatch.setattr(poll, "squeue", lambda ids: asked.append(clock.seconds) or answer(ids))
    slurm["7_0"] = SlurmJob(state="PENDING", script=SCRIPT)
    assert not status.wait_for_jobs(store, seconds=3600)
    assert [b - a for a, b in pairwise(asked[:6])] == [5, 10, 20, 40, 60]
    assert 100 * len(asked) / 3600 < 10


def test_a_waiting_command_sees_the_end_of_a_job_at_once(store, slurm, monkeypatch):
    clock = Clock()
    for module in (poll, status):
        monkeypatch.setattr(module, "time", clock)
    slurm["7_0"] = SlurmJob(state="RUNNING", script=SCRIPT)
    ended = {"event": "job_end", "cause": "done", "reason": "", "time": time.time()}

    def sleep(seconds: float) -> None:
        clock.seconds += seconds
        if clock.seconds == 300:
            write_events(store, START, ended)

    monkeypatch.setattr(clock, "sleep", sleep)
    assert status.wait_for_jobs(store, seconds=3600)
    assert clock.seconds == 300


def test_records_that_jobs_report_and_the_file_system_hides_are_waited_for(
    store, slurm, monkeypatch
):
    clock = Clock()
    start = first_run_start(store)
    ended = start | {"event": "run_end", "status": "measured", "will_repeat": False}
    write_events(store, START, start, ended | {"time": time.time()})
    slurm["7_0"] = SlurmJob(state="RUNNING", script=SCRIPT)
    record = replace(measured_run(start["cell_id"], "b", 1.0), run_id=start["run_id"])

    def sleep(seconds: float) -> None:
        clock.seconds += seconds
        if clock.seconds == 50:
            store.save_run(record)

    monkeypatch.setattr(clock, "sleep", sleep)
    monkeypatch.setattr(poll, "time", clock)
    console = Console(file=io.StringIO())
    wait_for_records(store, reconcile(store), console)
    assert clock.seconds == 50
    (store.cell(start["cell_id"]) / "runs" / f"{start['run_id']}.json").unlink()
    wait_for_records(store, reconcile(store), console)
    assert 170 <= clock.seconds <= 172, "not for ever"
    assert "1 record after 120 s" in " ".join(console.file.getvalue().split())


def test_a_folder_that_was_renamed_is_not_made_again(store, slurm):
    slurm["7_0"] = SlurmJob(state="RUNNING", script=SCRIPT)
    [array] = job_arrays(store)
    store.root.rename(store.root.with_name("moved"))
    with pytest.raises(SweepGoneError, match="is gone"):
        store.save_run(measured_run("a", "b", 1.0))
    with pytest.raises(SweepGoneError, match="is gone"):
        append_line(array.folder / "0.jsonl", START)
    assert not store.root.exists()


def test_an_id_that_was_given_to_another_job_since_is_not_taken_for_ours(store, slurm):
    slurm["7_0"] = SlurmJob(state="RUNNING", script="/results/s/jobs/b/submission.sh")
    [state] = reconcile(store)
    assert state.state == "gone"
    slurm["7_0"] = SlurmJob(state="RUNNING", script="/moved/s/jobs/a/submission.sh")
    [state] = reconcile(store)
    assert state.state == "running"


def test_an_array_whose_id_was_not_noted_is_found_by_its_script(store, slurm, monkeypatch):
    [path] = store.root.glob("jobs/*/slurm_id")
    path.unlink()
    shown = {"/x/jobs/b/submission.sh": "5", "/x/jobs/a/submission.sh": "7"}
    monkeypatch.setattr(poll, "submitted_scripts", lambda users: shown)
    slurm["7_0"] = SlurmJob(state="PENDING")
    before = sorted(store.root.rglob("*"))
    [state] = poll.poll(store)
    assert (state.state, state.job.slurm_id) == ("waiting", "7_0")
    assert sorted(store.root.rglob("*")) == before, "`status` writes nothing"
    [state] = reconcile(store)
    assert (state.state, path.read_text()) == ("waiting", "7")


def test_an_array_without_an_id_is_not_given_up_while_slurm_does_not_answer(
    store, slurm, monkeypatch
):
    [path] = store.root.glob("jobs/*/slurm_id")
    path.unlink()
    array = store.root / "jobs" / "a" / "array.json"
    array.write_text(json.dumps(json.loads(array.read_text()) | {"time": time.time() - 3600}))
    monkeypatch.setattr(poll, "submitted_scripts", lambda users: None)
    assert [state.state for state in reconcile(store)] == ["unknown"]
    monkeypatch.setattr(poll, "submitted_scripts", lambda users: {})
    assert [state.state for state in reconcile(store)] == ["gone"]
    assert "submitting command died" in rows(store)[0][1]


@pytest.mark.parametrize("private", ["none", "jobs,usage"])
def test_nothing_is_concluded_about_jobs_that_slurm_hides_from_another_user(
    store, slurm, monkeypatch, private
):
    monkeypatch.setattr(poll, "controller_settings", lambda: {"PrivateData": private})
    assert [state.state for state in poll.poll(store)] == ["gone"], "its own user sees all"
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    [state] = poll.poll(store)
    assert state.state == ("gone" if private == "none" else "unknown")


def test_another_user_neither_notes_an_id_nor_takes_an_array_without_one_for_dead(
    store, slurm, monkeypatch
):
    [path] = store.root.glob("jobs/*/slurm_id")
    path.unlink()
    array = store.root / "jobs" / "a" / "array.json"
    array.write_text(json.dumps(json.loads(array.read_text()) | {"time": time.time() - 3600}))
    asked: list[int] = []
    shown = {"/x/jobs/a/submission.sh": "7"}
    monkeypatch.setattr(poll, "submitted_scripts", lambda users: asked.extend(users) or shown)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert [state.state for state in poll.poll(store)] == ["unknown"]
    assert not path.exists()
    assert asked == [array.stat().st_uid], "whose jobs they are"


def test_a_cell_that_a_new_job_will_run_is_waiting_again(store, slurm, capsys):
    slurm["7_0"] = SlurmJob(state="CANCELLED", reason="by 0")
    reconcile(store)
    show = import_module("vitsweep.cli.status").run
    assert show([str(store.root)]) == 3
    assert "killed 2" in capsys.readouterr().out
    [folder] = store.root.glob("jobs/*")
    again = folder.with_name("b")
    again.mkdir()
    for name in ("tasks.jsonl", "array.json"):
        (again / name).write_text((folder / name).read_text())
    (again / "slurm_id").write_text("8")
    slurm["8_0"] = SlurmJob(state="PENDING")
    assert show([str(store.root)]) == 0
    assert "waiting 2" in capsys.readouterr().out


def test_status_groups_cells_by_reason(store, slurm, capsys):
    slurm["7_0"] = SlurmJob(state="CANCELLED", reason="by 0")
    for cell in store.cells.iterdir():
        store.keep_row({"cell_id": cell.name, "status": "killed", "reason": "It was cancelled."})
    import_module("vitsweep.cli.status").run([str(store.root)])
    assert re.search("2 cells.*killed: It was cancelled", capsys.readouterr().out)


def test_status_distinguishes_cells_and_names_the_command_that_continues(store, capsys):
    folder = store.root / "jobs"
    folder.rename(store.root / "no_jobs")
    waiting, refused = sorted(cell.name for cell in store.cells.iterdir())
    store.append_command({"command": "python -m vitsweep first", "cells": [waiting, refused]})
    store.append_command({"command": "python -m vitsweep other", "cells": [refused]})
    store.keep_row({"cell_id": refused, "status": "invalid", "reason": "No.", "sharding": "zero1"})
    import_module("vitsweep.cli.status").run([str(store.root)])
    shown = capsys.readouterr().out
    assert "invalid: No." in shown
    assert ": python -m vitsweep first" in shown


@pytest.mark.parametrize("verb", sorted({"status", "collect", "report", "gate"} & VERBS.keys()))
def test_a_verb_that_only_shows_a_sweep_records_nothing(store, slurm, verb, capsys):
    write_events(store, START, first_run_start(store))
    against = ["--against", str(store.root)] if verb == "gate" else []
    with suppress(VitsweepError):  # there is nothing yet that `gate` could compare
        assert VERBS[verb].run([str(store.root), *against]) in (0, 3)
    assert rows(store) == []
    if verb in ("status", "collect"):
        assert f"collect {store.root} --reconcile" in " ".join(capsys.readouterr().out.split())


def ended(*statuses: str, starts: int = 1) -> set[str]:
    """Cells that a job skips after its first blocks ended so for cell `a`; `b` was measured."""
    runs = [Run(f"b{n}", place, cell, f"b{n}-{cell}") for n in range(5) for place, cell in pair()]
    final = {f"b{n}-a": status for n, status in enumerate(statuses)} | {"b0-b": "measured"}
    started = [{"event": "run_start", "run": name} for name in final for _ in range(starts)]
    return JobEvents(started).cells_to_skip(runs, final)


def pair() -> list[tuple[int, str]]:
    return list(enumerate("ab"))


def test_a_job_goes_on_with_a_cell_that_was_killed_once():
    assert ended("measured", "killed") == set()
    assert ended("preempted", "measured", "killed") == set()
    assert ended("killed", "killed", "killed") == {"a"}
    assert ended("killed", starts=3) == {"a"}, "its attempts are used up"
    assert ended("measured", "out_of_memory") == {"a"}


def test_a_start_that_ended_during_its_warm_up_is_known():
    begun, done = ({"event": f"warm_up_{part}"} for part in ("start", "end"))
    assert not JobEvents([]).ended_in_warm_up
    assert JobEvents([begun]).ended_in_warm_up
    assert not JobEvents([begun, done]).ended_in_warm_up


def test_a_record_names_the_code_that_ran_and_not_that_of_the_submission(tmp_path, monkeypatch):
    of_submission = {"git_commit": "before", "git_dirty": False}
    monkeypatch.setattr(coordinator, "code_state", lambda: {"git_commit": "now", "git_dirty": True})
    assert coordinator.code_that_runs(tmp_path, of_submission)["git_commit"] == "now"
    monkeypatch.setattr(coordinator, "code_state", lambda: {"git_commit": None, "git_dirty": None})
    assert coordinator.code_that_runs(tmp_path, of_submission) == of_submission
    monkeypatch.setattr(coordinator, "PACKAGE_FOLDER", tmp_path / "code" / "ab" / "vitsweep")
    monkeypatch.setattr(coordinator, "code_state", lambda: pytest.fail("it is a copy"))
    assert coordinator.code_that_runs(tmp_path, of_submission) == of_submission


def test_the_controllers_settings_are_asked_for_until_it_answers_and_once(monkeypatch):
    answers = iter([None, "ClusterName = here\nPrivateData = none\n"])
    monkeypatch.setattr(commands, "_SETTINGS", {})
    monkeypatch.setattr(commands, "slurm_output", lambda *command: next(answers))
    found = [commands.controller_settings().get("ClusterName") for _ in range(3)]
    assert found == [None, "here", "here"]


def test_cells_of_live_jobs_are_not_packed(store: Store, slurm: dict[str, SlurmJob | None]) -> None:
    slurm["7_0"] = SlurmJob(state="RUNNING")
    store.save_run(measured_run("dd"))
    assert pack_ended(store) == (1, 2)
    assert len([*store.folders()]) == 2
    slurm.clear()
    assert pack_ended(store) == (2, 0)
    assert not [*store.folders()]
