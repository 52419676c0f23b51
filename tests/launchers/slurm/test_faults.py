"""Faults on a real Slurm: every cell ends in one row with its reason; nothing is lost or doubled."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.command import NO_REPORT, Command, fault
from tests.launchers.slurm.conftest import SlurmClient, eventually
from tests.launchers.slurm.sweeps import SMALL, Sweep, hang
from vitsweep.training.checkpoint_files import CHECKPOINT_FOLDER, MEASUREMENT_FILE


@pytest.fixture
def sweep(vitsweep: Command, slurm_environ: SlurmClient) -> Iterator[Sweep]:
    yield Sweep(vitsweep, slurm_environ)
    slurm_environ.cancel_all()


def hang_once(folder: Path) -> list[str]:
    """A cell that hangs in its first attempt."""
    target = "sequence_parallel._target_=tests.launchers.slurm.faults.HangOnce"
    return [target, "+sequence_parallel.rank=1", f"+sequence_parallel.marker={folder / 'struck'}"]


def has_struck(folder: Path) -> Callable[[], bool]:
    return (folder / "struck").exists


@pytest.mark.slow
def test_jobs_outlive_their_command_and_a_dead_rank_ends_its_run_and_no_other(sweep: Sweep) -> None:
    """Of three cells a rank dies; two more have variables of their own."""
    seen = sweep.command.folder / "seen"
    module = ["model=module", "model.target=tests.variables_seen.build",
              f"++model.arguments.seen_in={seen}"]  # fmt: skip
    own = [[*module, f"runtime.variables={{NCCL_ALGO:{name}}}"] for name in ("Ring", "Tree")]
    texts = [*map(fault, ("Raise", "Kill", "Leave")), *own]
    cells_asked = ",".join(f"""['{"','".join(each)}']""" for each in texts)
    running = sweep.command.fork(
        "-m", *SMALL, f"sweep.cells=[{cells_asked}]", "sweep.baseline=null", "data=digits",
        "batch.images_per_step=8", "resources.ranks_per_node=2", "measurement=smoke",
        "measurement.prove=none", NO_REPORT, quick=False,
    )  # fmt: skip
    sweep.until_running()
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()

    cells = sweep.until_ended().set_index("status")
    assert sorted(cells.index) == ["failed", "failed", "killed", "measured", "measured"]
    assert set(cells.loc["measured", "runtime.variables.NCCL_ALGO"]) == {"Ring", "Tree"}
    assert {"Ring unset", "Tree unset"} <= {*seen.read_text().splitlines()}
    assert re.search(r"Rank 1 .*SIGKILL", cells.loc["killed", "reason"])
    reasons = " ".join(cells.loc["failed", "reason"])
    assert "KeyError: 'a bug in a technique'" in reasons
    assert re.search(r"Rank 1 .* 9\b", reasons)
    assert set(cells.drop("measured")["failed_rank"]) == {1}
    assert sweep.client.states(sweep.job) == ["FAILED"]  # Slurm does not call it a success


@pytest.mark.full
def test_a_dead_node_is_survived_by_the_rest_of_its_job(sweep: Sweep) -> None:
    folder = sweep.command.folder
    sweep.submit(
        *hang_once(folder), "sharding=ddp,fsdp", "sweep.baseline=null", "sweep.cells_per_block=1"
    )
    eventually(has_struck(folder), 400, "the fault")
    node = (sweep.events.last_start or {})["nodes"][0]
    sweep.client.kill_node(node)
    try:
        cells = sweep.until_ended(240)
    finally:
        sweep.client.start_node(node)

    assert cells["status"].tolist() == ["measured", "measured"]
    runs = sweep.command.runs().sort_values("attempt")
    assert runs["status"].tolist().count("measured") == 2
    [lost] = runs[runs["status"] == "killed"].to_dict("records")
    assert "started again" in lost["reason"]
    again = runs[(runs["cell_id"] == lost["cell_id"]) & (runs["status"] == "measured")]
    assert again["attempt"].tolist() == [2]


@pytest.mark.slow
def test_cancelled_jobs_are_rows_and_other_jobs_continue(sweep: Sweep) -> None:
    [array] = sweep.submit(*hang("ddp,fsdp"), "hydra.launcher.cells_per_job=1")
    first, second = array.jobs()
    eventually(lambda: second.events().in_flight is not None, 400, "both runs")
    sweep.client.run("scancel", first.slurm_id)
    eventually(lambda: first.events().end is not None, 60, "the end of one job")
    assert second.events().end is None

    done = sweep.command("cancel", quick=False)
    assert "Cancelled 1 job." in done.stdout, done.stderr
    cells = sweep.until_ended()
    assert cells["status"].tolist() == ["killed", "killed"]
    assert cells["reason"].str.contains("cancelled").all()


@pytest.mark.full
def test_the_time_limit_ends_a_run_and_the_rest_runs_in_a_later_start(sweep: Sweep) -> None:
    folder = sweep.command.folder
    sweep.submit(
        *hang_once(folder), "sharding=ddp,fsdp", "sweep.baseline=null", "sweep.cells_per_block=1",
        "hydra.launcher.timeout_min=1",
    )  # fmt: skip
    cells = sweep.until_ended(240).set_index("sharding")

    assert cells["status"].to_dict() == {"ddp": "timed_out", "fsdp": "measured"}
    assert re.search(r"time limit .*\b1 min", cells.loc["ddp", "reason"])
    assert [event["signal"] for event in sweep.events.of_kind("signal")] == ["SIGUSR2"]


@pytest.mark.full
def test_a_preempted_run_is_recorded_and_runs_again(sweep: Sweep) -> None:
    folder = sweep.command.folder
    sweep.submit(
        *hang_once(folder), "sharding=ddp,fsdp", "sweep.baseline=null", "sweep.cells_per_block=1",
        "hydra.launcher.partition=scavenge",
    )  # fmt: skip
    eventually(has_struck(folder), 400, "the fault")
    sweep.client.submit("sleep 2", "--partition=high", "--nodes=4", "--exclusive")
    cells = sweep.until_ended()

    assert cells["status"].tolist() == ["measured", "measured"]
    runs = sweep.command.runs()
    [preempted] = runs[runs["status"] == "preempted"].to_dict("records")
    assert preempted["attempt"] == 1
    assert "preempted" in preempted["reason"]
    assert len(runs) == 3


@pytest.mark.full
@pytest.mark.parametrize("by", ["scontrol requeue", "preemption with GraceTime=0"])
def test_a_job_that_slurm_requeues_without_grace_is_waited_for(sweep: Sweep, by: str) -> None:
    folder, client = sweep.command.folder, sweep.client
    client.run("scontrol", "update", "partition=scavenge", "gracetime=0")
    running = sweep.command.start(
        "-m", *SMALL, *hang_once(folder), "sharding=ddp,fsdp", "sweep.baseline=null",
        "sweep.cells_per_block=1", "hydra.launcher.partition=scavenge",
    )  # fmt: skip
    try:
        eventually(has_struck(folder), 400, "the fault")
        if by == "scontrol requeue":
            client.run("scontrol", "requeue", sweep.job)
        else:
            client.submit("sleep 2", "--partition=high", "--nodes=4", "--exclusive")
        out, error = running.communicate(timeout=240)
    finally:
        client.run("scontrol", "update", "partition=scavenge", "gracetime=10")

    assert running.returncode == 0, out + error
    runs = sweep.command.runs()
    ends = sorted(zip(runs["status"], runs["attempt"], strict=True))
    assert ends == [("measured", 1), ("measured", 2), ("preempted", 1)], runs["reason"].tolist()
    assert sweep.command.cells()["status"].tolist() == ["measured", "measured"]


@pytest.mark.full
def test_a_preempted_training_continues_where_it_was(sweep: Sweep) -> None:
    asked = ("task=train", "task.epochs=40", "batch.images_per_step=128", "sharding=fsdp")
    sweep.submit(*asked, "sweep.baseline=null", "hydra.launcher.partition=scavenge")
    cells = sweep.command.store.cells
    eventually(
        lambda: any(cells.glob(f"*/attempts/*/{CHECKPOINT_FOLDER}/{MEASUREMENT_FILE}")),
        400,
        "training",
    )
    [measured] = cells.glob(f"*/attempts/*/{CHECKPOINT_FOLDER}/{MEASUREMENT_FILE}")
    before = json.loads(measured.read_text())
    sweep.client.submit("sleep 2", "--partition=high", "--nodes=4", "--exclusive")
    [row] = sweep.until_ended().to_dict("records")

    assert (row["status"], row["blocks"]) == ("measured", 1)
    assert 0.2 < row["accuracy_top1"] <= 1
    first, second = sorted(sweep.command.store.runs(), key=lambda run: run.attempt)
    assert (first.status, second.status) == ("preempted", "measured")
    assert int(re.search(r"saved after (\d+) steps", first.reason)[1]) > 0  # type: ignore[index]
    assert second.samples.items() >= before["samples"].items()  # it was not measured again
    assert not list(cells.glob(f"*/attempts/*/{CHECKPOINT_FOLDER}"))


@pytest.mark.full
def test_a_cancelled_training_goes_on_with_the_next_sweep(sweep: Sweep) -> None:
    asked = ("task=train", "task.epochs=40", "batch.images_per_step=128", "sharding=fsdp")
    sweep.submit(*asked, "sweep.baseline=null")
    cells = sweep.command.store.cells
    eventually(
        lambda: any(cells.glob(f"*/attempts/*/{CHECKPOINT_FOLDER}/{MEASUREMENT_FILE}")),
        400,
        "training",
    )
    sweep.client.run("scancel", sweep.job)
    [cancelled] = sweep.until_ended().to_dict("records")
    assert cancelled["status"] == "killed"
    assert re.search(r"cancelled.* \d+ steps", cancelled["reason"]), cancelled["reason"]

    sweep.submit(*asked, "sweep.baseline=null")
    [row] = sweep.until_ended().to_dict("records")
    assert row["status"] == "measured", row["reason"]
    assert re.search(r" [1-9]\d* steps\.", row["resumed"])
    assert not list(cells.glob(f"*/attempts/*/{CHECKPOINT_FOLDER}"))


@pytest.mark.full
def test_a_restarted_controller_loses_nothing(sweep: Sweep) -> None:
    folder = sweep.command.folder
    sweep.submit(
        *hang_once(folder), "sharding=fsdp", "sweep.baseline=null", "measurement.timeout_min=1.5"
    )
    eventually(has_struck(folder), 400, "the fault")
    os.kill(sweep.client.cluster.alive("slurmctld") or 0, signal.SIGKILL)
    told = sweep.command("status", quick=False)
    sweep.client.cluster.start()  # the tests after this one need it, whatever was told
    assert "Slurm does not answer" in told.stdout
    assert "running 1" in told.stdout

    cells = sweep.until_ended()
    assert cells["status"].tolist() == ["timed_out"]
    assert "measurement.timeout_min=1.5" in cells["reason"][0]


@pytest.mark.full
def test_a_job_that_ends_without_an_event_is_killed_with_that_reason(sweep: Sweep) -> None:
    sweep.submit(*hang())
    sweep.until_ranks_run()
    for process in psutil.process_iter(["cmdline"]):
        if str(sweep.arrays[0].folder) in (process.info["cmdline"] or []):
            process.kill()
    cells = sweep.until_ended()

    assert cells["status"].tolist() == ["killed"]
    assert f"Job {sweep.job}" in cells["reason"][0]


@pytest.mark.full
def test_a_dead_node_of_several_is_noticed_at_once(sweep: Sweep) -> None:
    folder = sweep.command.folder
    sweep.submit(
        *hang_once(folder), "sharding=fsdp", "sweep.baseline=null",
        "resources.nodes=2", "resources.ranks_per_node=1",
    )  # fmt: skip
    eventually(has_struck(folder), 400, "the fault")
    [_, second] = (sweep.events.last_start or {})["nodes"]
    sweep.client.kill_node(second)
    try:
        eventually(lambda: bool(sweep.events.of_kind("run_end")), 25, "the end of the run")
        [end] = sweep.events.of_kind("run_end")
        assert (end["status"], end["will_repeat"]) == ("killed", True)
        assert f"Node {second} was lost" in end["reason"]
    finally:
        sweep.client.start_node(second)
    cells = sweep.until_ended(240)
    assert cells["status"].tolist() == ["measured"]
    assert cells["attempt"].tolist() == [2]


@pytest.mark.full
def test_a_job_that_comes_back_after_another_replaced_it_measures_nothing_twice(
    sweep: Sweep,
) -> None:
    folder = sweep.command.folder
    asked = (*hang_once(folder), "sharding=ddp,fsdp", "sweep.baseline=null")
    [first] = sweep.submit(*asked)
    eventually(has_struck(folder), 400, "the fault")
    for process in psutil.process_iter(["cmdline"]):
        if str(first.folder) in (process.info["cmdline"] or []):
            process.kill()
    sweep.until_ended()
    [_, second] = sweep.submit(*asked)
    assert sweep.until_ended()["status"].tolist() == ["measured", "measured"]

    [job], [other] = first.jobs(), second.jobs()
    sweep.client.run("scontrol", "requeue", job.slurm_id)
    eventually(lambda: job.events().is_done, 180, "the end of the job that came back")
    [taken_over] = job.events().of_kind("taken_over")
    assert taken_over["cells"] == sorted(run.cell_id for run in other.runs())
    runs = sweep.command.runs()
    assert runs["status"].tolist().count("measured") == 2
