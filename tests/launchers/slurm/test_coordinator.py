"""What the coordinator of a job writes and decides: ends, repeats, heartbeats, and its exit code."""

import errno
import multiprocessing
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launchers.slurm.fabricated import START, first_run_start, write_events
from tests.launchers.slurm.test_reconcile import ends, restarted
from vitsweep.errors import VitsweepError
from vitsweep.files import SweepGoneError
from vitsweep.launchers.nodes.transport import LOOPBACK
from vitsweep.launchers.slurm.node import coordinator as module
from vitsweep.launchers.slurm.node import signals
from vitsweep.launchers.slurm.node.coordinator import (
    INTERRUPTED,
    NOT_ALL_MEASURED,
    NOT_STARTED,
    Coordinator,
    JobEnvironment,
    JobEventWriter,
    coordinate,
)
from vitsweep.launchers.slurm.node.signals import JobEnding, Signals
from vitsweep.launchers.slurm.state.jobs import ArrayJob, JobArray
from vitsweep.results.record import Status
from vitsweep.results.store import Store

ENV = JobEnvironment(
    job_id="8", array_id="7", index=0, restart=1, node_index=0, nodes=("n1",), launch_address=None
)


@pytest.fixture
def job(store: Store) -> ArrayJob:
    [job] = JobArray(store.root / "jobs" / "a").jobs()
    job.array.facts["signal_delay_s"] = 60
    job.array.facts["request"]["minutes"] = 30
    return job


def ended(status: Status, cause: str, requeue: bool, step: int | None) -> JobEnding:
    ending = JobEnding(status, "It ends.", requeue=requeue, cause=cause)
    ending.saved_step = step
    return ending


def raising(error: Exception) -> Any:
    def attempt(*_: Any) -> None:
        raise error

    return attempt


def test_an_interrupted_run_is_repeated_where_the_job_may_start_again(store, job, monkeypatch):
    timed_out, killed = Status.timed_out, Status.killed
    for status, cause, requeue, step, num_runs, repeats in (
        (timed_out, "time limit", True, None, 1, False),  # it would time out again
        (timed_out, "time limit", True, None, 2, True),
        (timed_out, "time limit", True, 7, 1, True),
        (Status.preempted, "preempted", True, None, 1, True),
        (killed, "cancelled", False, None, 1, True),  # somebody may requeue it
        (killed, "replaced", False, None, 1, False),
        (killed, "replaced", False, 7, 1, False),
    ):
        found = restarted(job, store)
        found.num_started_runs = num_runs - 1
        run = job.runs()[0]
        cell = found.cell(run.cell_id)
        ending = ended(status, cause, requeue, step)
        monkeypatch.setattr(found.runner, "attempt", raising(ending))
        with pytest.raises(JobEnding):
            found.attempt(found.runner.request(run, cell, 1), cell)
        end = job.events().of_kind("run_end")[-1]
        assert (end["will_repeat"], end["saved_step"]) == (repeats, step), (cause, step, num_runs)
        assert end["status"] == str(status)
        assert ("7 steps" in end["reason"]) == (step == 7)
        job.events_path.unlink()
        for path in store.cell(run.cell_id).glob("runs/*"):
            path.unlink()


def test_a_run_without_progress_is_given_up_after_so_many_attempts(store, job, monkeypatch):
    run, start = job.runs()[0], first_run_start(store)
    asked: list[tuple[str, int]] = []

    def attempt(request: Any, cell: Any) -> Any:
        asked.append((request.name, request.attempt))
        return ends(store, Status.failed, request, cell)

    saved = start | {"event": "run_end", "status": "preempted", "will_repeat": True}
    for before, given_up, number in (
        ([start], False, 2),
        ([start, start, start], True, 0),
        ([start, start, saved | {"saved_step": 5}, start], False, 4),
        ([start, start, saved | {"saved_step": 0}, start], True, 0),
    ):
        write_events(store, START, *before)
        found = restarted(job, store)
        monkeypatch.setattr(found.runner, "warm_up", lambda *_: SimpleNamespace(status="measured"))
        monkeypatch.setattr(found.runner, "attempt", attempt)
        found.run(found.coming())
        [end] = [e for e in job.events().of_kind("run_end")[-2:] if e["run"] == run.name]
        assert (end["status"], end["will_repeat"]) == ("killed" if given_up else "failed", False)
        assert (run.name, number) == asked[0] or given_up
        assert found.num_started_runs == len(asked) == (1 if given_up else 2)
        assert ("3 times" in end["reason"]) == given_up
        asked.clear()
        job.events_path.unlink()
        for path in store.root.glob("cells/*/runs/*"):
            path.unlink()


def test_records_say_how_long_the_job_was_queued(store, job, monkeypatch):
    monkeypatch.setattr(module, "code_state", lambda: {"git_commit": None, "git_dirty": None})
    found = Coordinator(ENV, job, b"key")
    for waited, queued_s in ((12.34, 12.3), (0.0, 0.0), (-0.2, None)):
        found._started_at = found.facts["time"] + waited
        columns = found._columns(store.root)
        assert columns["queued_s"] == queued_s
        assert (columns["launcher"], columns["slurm_job_id"]) == ("slurm", "7_0")
    assert module.code_that_runs(store.root, {"git_commit": "c"}) == {"git_commit": "c"}


def test_a_heartbeat_is_written_where_nothing_else_was_for_a_while(job, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))
    log = JobEventWriter(job, 2)
    log.write("signal", signal="x")
    for seconds, beats in ((0, 0), (module.HEARTBEAT_SECONDS, 0), (1, 1), (29, 1), (2, 2)):
        now[0] += seconds
        log.heartbeat()
        assert len(job.events().of_kind("heartbeat")) == beats
    assert all(event["restart"] == 2 for event in job.events().events)


def test_a_later_start_of_the_job_replaces_this_one(store, job):
    for restart, newer in ((0, None), (1, None), (2, 2)):
        write_events(store, START | {"restart": restart})
        assert JobEventWriter(job, 1).newer_restart == newer
    with pytest.raises(JobEnding) as ending:
        list(restarted(job, store).coming())
    assert (ending.value.cause, ending.value.requeue) == ("replaced", False)


def test_all_are_measured_where_no_run_ended_otherwise(job):
    log = JobEventWriter(job, 0)
    assert log.all_measured
    log.final_statuses = {"a": "measured"}
    assert log.all_measured
    log.final_statuses["b"] = "failed"
    assert not log.all_measured


def test_an_interrupted_job_is_requeued_for_what_remains(store, job, monkeypatch):
    asked: list[str] = []
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    for requeue, cause, answer, remaining, requeued, asks, sleeps in (
        (True, "preempted", True, 2, True, ["8"], 1),
        (True, "preempted", False, 2, True, ["8"], 0),
        (True, "requeued", False, 2, True, [], 1),
        (False, "cancelled", True, 2, False, [], 0),
        (True, "preempted", True, 0, False, [], 0),
    ):
        monkeypatch.setattr(
            module, "requeue", lambda job_id, answer=answer: asked.append(job_id) or answer
        )
        found = Coordinator(ENV, job, b"key")
        if not remaining:
            found.event_log.leave_to_other_jobs({run.cell_id for run in job.runs()})
        code = found.interrupt(ended(Status.preempted, cause, requeue, None))
        end = job.events().of_kind("job_end")[-1]
        assert (code, end["exit_code"]) == (INTERRUPTED, INTERRUPTED)
        assert (end["requeued"], end["remaining"], end["cause"]) == (requeued, remaining, cause)
        assert (asked, len(slept)) == (asks, sleeps)
        asked.clear()
        slept.clear()
        job.events_path.unlink()


def test_the_exit_code_of_a_job_says_how_it_ended(store, job, monkeypatch):
    for statuses, code in (({}, 0), ({"r": "measured"}, 0), ({"r": "failed"}, NOT_ALL_MEASURED)):
        monkeypatch.setattr(
            Coordinator,
            "run_all",
            lambda self, statuses=statuses: self.event_log.final_statuses.update(statuses),
        )
        assert coordinate(ENV, job, b"") == code
        end = job.events().of_kind("job_end")[-1]
        assert (end["cause"], end["exit_code"]) == ("done", code)

    errors = {
        VitsweepError("No."): NOT_STARTED,
        SweepGoneError(store.root): NOT_STARTED,
        OSError(errno.ENOSPC, "full"): errno.ENOSPC,
        ended(Status.killed, "replaced", False, None): INTERRUPTED,
    }
    left = iter([*errors, OSError(errno.EPERM, "no")])

    def run_all(self: Coordinator) -> None:
        raise next(left)

    monkeypatch.setattr(Coordinator, "run_all", run_all)
    assert [coordinate(ENV, job, b"") for _ in errors] == [*errors.values()]
    with pytest.raises(OSError, match="no"):
        coordinate(ENV, job, b"")


def test_a_signal_ends_the_run_and_is_noted(store, job):
    found = Coordinator(ENV, job, b"key")
    ending = ended(Status.preempted, "preempted", True, None)
    found.signals = SimpleNamespace(due=lambda: ending, seconds_left=12.34, received="SIGTERM")
    found._nodes = SimpleNamespace(kill_timeout_s=99.0)
    with pytest.raises(JobEnding):
        found._on_wait()
    [event] = job.events().of_kind("signal")
    assert (event["signal"], event["seconds_left"]) == ("SIGTERM", 12.3)
    assert found._nodes.kill_timeout_s == module.SHORT_KILL_TIMEOUT_SECONDS


def test_a_job_warms_up_once_where_cells_are_compared(store, job, monkeypatch):
    warmed: list[str] = []

    def warm_up(request: Any, cell: Any) -> Any:
        warmed.append(request.cell_id)
        return SimpleNamespace(status=Status.measured)

    for begun, needs, num in (
        ([], True, 1),
        ([], False, 0),
        ([{"event": "warm_up_start", "cell_id": "c"}], True, 0),
    ):
        write_events(store, START, *begun)
        found = restarted(job, store)
        monkeypatch.setattr(module, "needs_warm_up", lambda cells, needs=needs: needs)
        monkeypatch.setattr(found.runner, "warm_up", warm_up)
        monkeypatch.setattr(found.runner, "attempt", partial(ends, store, Status.failed))
        found.run(found.coming())
        assert warmed == [job.runs()[0].cell_id] * num
        assert len(job.events().of_kind("warm_up_end")) == num
        assert len(job.events().of_kind("run_end")) == 2
        warmed.clear()
        job.events_path.unlink()
        for path in store.root.glob("cells/*/runs/*"):
            path.unlink()


def test_a_job_whose_node_is_gone_begins_no_run_and_is_requeued(store, job, monkeypatch):
    here, agent = multiprocessing.Pipe()
    agents = [({"node": "n1", "address": LOOPBACK}, here)]
    waiting = SimpleNamespace(accept_agents=lambda seconds: agents)
    monkeypatch.setattr(module, "AgentListener", lambda *_: waiting)
    agent.close()
    with pytest.raises(JobEnding, match="n1 was lost") as ending:
        Coordinator(ENV, job, b"key").run_all()
    assert (ending.value.requeue, ending.value.cause) == (True, "node lost")
    assert [e["event"] for e in job.events().events] == ["job_start"]


def test_time_is_kept_back_in_which_the_run_is_recorded():
    for seconds_left, to_save in ((0, 0), (9, 6), (15, 10), (60, 55), (-3, -2)):
        ending = JobEnding(Status.killed, "x", requeue=False, cause="c", seconds_left=seconds_left)
        assert ending.seconds_to_save == pytest.approx(to_save)


def test_a_warning_of_the_time_limit_waits_until_its_delay(monkeypatch):
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: None)
    monkeypatch.setattr(signals, "time", clock)
    monkeypatch.setattr(signals, "controller_settings", dict)
    facts: dict[str, str] = {}
    monkeypatch.setattr(signals, "job_facts", lambda job_id: facts)
    found = Signals("8", "7_0", started_at=0.0, limit_s=600.0, delay_s=60.0)
    assert found.due() is None
    found.received = "SIGUSR2"
    for second, due in ((455.0, False), (539.9, False), (540.0, True), (599.0, True)):
        now[0] = second
        assert found.seconds_left == 600.0 - second
        assert (found.due() is not None) == due
    for second, signal, said, cause, status, left in (
        (0.0, "SIGUSR2", {}, "preempted", "preempted", 60.0),
        (449.9, "SIGUSR2", {}, "preempted", "preempted", 60.0),
        (450.1, "SIGUSR2", {}, "time limit", "timed_out", 60.0),
        (590.0, "SIGUSR2", {}, "time limit", "timed_out", 10.0),
        (590.0, "SIGTERM", {}, "time limit", "timed_out", 30.0),
        (0.0, "SIGTERM", {}, "cancelled", "killed", 30.0),
        (0.0, "SIGUSR2", {"JobState": "CANCELLED", "Restarts": "1"}, "cancelled", "killed", 30.0),
        (0.0, "SIGTERM", {"Restarts": "1"}, "requeued", "preempted", 0.0),
        (0.0, "SIGTERM", {"Restarts": "0", "PreemptTime": "N/A"}, "cancelled", "killed", 30.0),
        (0.0, "SIGTERM", {"PreemptTime": "2026-10-20T10:00:00"}, "preempted", "preempted", 60.0),
    ):
        now[0], facts = second, said
        found.received, found.received_at = signal, second
        ending = found.ending()
        assert (ending.cause, ending.status) == (cause, status), (second, signal, said)
        assert ending.requeue == (cause != "cancelled")
        assert ending.seconds_to_save == pytest.approx(left - min(5.0, left / 3))
