"""`status`, `cancel` and `collect` of jobs, from their events and from what Slurm says, without a cluster."""

import re
import time
from importlib import import_module
from pathlib import Path

import pytest

from tests.launchers.slurm.fabricated import SCRIPT, START, first_run_start, write_events
from vitsweep.errors import VitsweepError
from vitsweep.files import append_line
from vitsweep.launchers.slurm.commands import SlurmJob, _exit_code
from vitsweep.launchers.slurm.state.jobs import ArrayJob, JobArray
from vitsweep.launchers.slurm.state.status import UNCONFIRMED
from vitsweep.results.store import Store

DENIED = "scancel: error: Kill job error on job id 7_0: Access/permission denied"


def shown(verb: str, store: Store, capsys: pytest.CaptureFixture[str]) -> str:
    """What a verb prints about a sweep, on one line."""
    import_module(f"vitsweep.cli.{verb}").run([str(store.root)])
    return " ".join(capsys.readouterr().out.split())


def command_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Put a shell script before all other commands."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_damaged_event_is_skipped_and_those_after_it_are_read(tmp_path):
    path = tmp_path / "0.jsonl"
    path.write_bytes(b'{"event":"heartbeat","ti\n\xff\xfe\x00\n{"event": "job_end"}\n')
    job = ArrayJob(JobArray(tmp_path), 0, {})
    assert job.events().events == []
    append_line(path, {"event": "heartbeat"})
    events = job.events()
    assert job.events(events) is events
    append_line(path, {"event": "reconciled"})
    assert [e["event"] for e in job.events(events).events] == ["heartbeat", "reconciled"]


@pytest.mark.parametrize("name", ["array.json", "tasks.jsonl"])
def test_a_damaged_file_of_an_array_is_named(store, slurm, name):
    path = store.root / "jobs" / "a" / name
    path.write_text(path.read_text()[:20])
    with pytest.raises(VitsweepError, match=f"jobs/a/{name}` is damaged"):
        import_module("vitsweep.cli.status").run([str(store.root)])


@pytest.mark.parametrize("answer", ["running", "silent"])
def test_a_cell_in_flight_on_the_cluster_is_running_not_waiting(store, slurm, answer, capsys):
    write_events(store, START, first_run_start(store))
    slurm["7_0" if answer == "running" else answer] = SlurmJob(state="RUNNING")
    counts = shown("status", store, capsys).partition("Cells of s: ")[2]
    assert {"running 1", "waiting 1"} == {*counts.partition(" Slurm")[0].split(" · ")}
    slurm.clear()
    slurm["7_0"] = SlurmJob(state="PENDING", restarts=1)
    assert "Cells of s: waiting 2" in shown("status", store, capsys), "the run was requeued"


def test_a_command_that_has_not_begun_its_first_run_is_seen(store, capsys):
    (store.root / "jobs").rename(store.root / "no_jobs")
    cells = [cell.name for cell in store.cells.iterdir()]
    store.append_command({"command": "python -m vitsweep x", "cells": cells})
    with store.lock():
        assert "is at work" in shown("status", store, capsys)
        assert import_module("vitsweep.cli.status").run([str(store.root)]) == 0
    assert "python -m vitsweep x" in shown("status", store, capsys)
    assert import_module("vitsweep.cli.status").run([str(store.root)]) == 3


@pytest.mark.parametrize("verb", ["status", "collect"])
def test_what_slurm_says_of_a_dead_job_is_shown_before_it_is_recorded(store, slurm, verb, capsys):
    slurm["7_0"] = SlurmJob(state="CANCELLED", reason="by 0")
    found = shown(verb, store, capsys)
    assert re.search("1 job .*--reconcile`", found)
    assert re.search("Job 7_0 .*cancelled", found)


def test_jobs_that_slurm_refuses_to_cancel_are_reported_at_once(
    store, slurm, tmp_path, monkeypatch, capsys
):
    slurm["7_0"] = SlurmJob(state="PENDING", script=SCRIPT)
    command_on_path(tmp_path / "bin", monkeypatch, "scancel", f"echo '{DENIED}' >&2; exit 1")
    monkeypatch.setattr(
        "vitsweep.launchers.slurm.state.status._wait_until_gone",
        lambda store, cancelled: pytest.fail("nothing to wait for"),
    )
    with pytest.raises(VitsweepError, match=r"1 job .*7_0.*permission denied"):
        import_module("vitsweep.cli.cancel").run([str(store.root)])
    assert "Cancelled" not in capsys.readouterr().out


@pytest.mark.parametrize("script", ["", "/results/other/jobs/b/submission.sh"])
def test_a_job_that_slurm_does_not_know_as_one_of_the_sweep_is_not_cancelled(
    store, slurm, tmp_path, monkeypatch, script
):
    slurm["7_0"] = SlurmJob(state="RUNNING", script=script)
    write_events(store, START | {"time": time.time()})  # as a false folder would
    command_on_path(tmp_path / "bin", monkeypatch, "scancel", f"touch {tmp_path}/asked")
    monkeypatch.setattr("vitsweep.launchers.slurm.state.status.SECONDS_TO_CANCEL", 0.0)
    with pytest.raises(VitsweepError, match=f"1 job .*7_0.*{re.escape(UNCONFIRMED)}"):
        import_module("vitsweep.cli.cancel").run([str(store.root)])
    assert not (tmp_path / "asked").exists()


def test_only_jobs_that_are_gone_count_as_cancelled(store, slurm, tmp_path, monkeypatch, capsys):
    state = "vitsweep.launchers.slurm.state"
    slurm["7_0"] = SlurmJob(state="RUNNING", script=SCRIPT)
    command_on_path(tmp_path / "bin", monkeypatch, "scancel", "exit 0")
    monkeypatch.setattr(f"{state}.status.SECONDS_TO_CANCEL", 0.0)
    with pytest.raises(VitsweepError, match="Not cancelled: 1 job"):
        import_module("vitsweep.cli.cancel").run([str(store.root)])
    asked = iter(
        [SlurmJob(state="RUNNING", script=SCRIPT), SlurmJob(state="CANCELLED", reason="by 0")]
    )
    last = SlurmJob(state="CANCELLED", reason="by 0")
    monkeypatch.setattr(f"{state}.poll.squeue", lambda ids: {"7_0": next(asked, last)})
    assert import_module("vitsweep.cli.cancel").run([str(store.root)]) == 0
    assert "Cancelled 1 job." in capsys.readouterr().out


@pytest.mark.parametrize("scancel", ["exec sleep 30", None])
def test_a_scancel_that_is_missing_or_silent_is_named(store, slurm, tmp_path, monkeypatch, scancel):
    slurm["7_0"] = SlurmJob(state="RUNNING", script=SCRIPT)
    command_on_path(tmp_path / "bin", monkeypatch, "scancel", scancel or "")
    if scancel is None:
        monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("vitsweep.launchers.slurm.commands.TIMEOUT_SECONDS", 0.2)
    with pytest.raises(VitsweepError, match="`scancel`"):
        import_module("vitsweep.cli.cancel").run([str(store.root)])


def test_garbage_in_the_list_of_commands_is_left_out(store, slurm, capsys):
    store.append_command({"command": "python -m vitsweep x", "cells": []})
    with (store.root / "commands.jsonl").open("ab") as handle:
        handle.write(bytes(range(256)))
    assert "2 cells" in shown("collect", store, capsys)
    assert [entry["command"] for entry in Store(store.root).commands()] == ["python -m vitsweep x"]


def test_the_exit_code_of_a_job_is_the_upper_byte_of_its_status() -> None:
    assert _exit_code(str(9 << 8), "FAILED") == 9
    assert _exit_code("9", "FAILED") == 0, "a signal alone"
    assert _exit_code("0", "RUNNING") is None
