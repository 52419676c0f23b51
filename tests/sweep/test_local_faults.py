"""Whatever becomes of a cell on this machine, it is one row with its reason, and no other cell's."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.command import Command, fault

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("Raise", "failed", "KeyError: 'a bug in a technique'"),
        ("Kill", "killed", "Rank 1 was ended by SIGKILL"),
        ("Leave", "failed", "Rank 1 left with exit code 9"),
    ],
)
def test_the_death_of_one_rank_ends_its_run_and_no_other(
    vitsweep: Command, name: str, status: str, reason: str
) -> None:
    done = vitsweep(*fault(name), "sharding=fsdp")

    assert done.returncode == 3, done.stderr
    cells = vitsweep.cells().set_index("sharding")
    assert cells.loc["fsdp", "status"] == status
    assert reason in cells.loc["fsdp", "reason"]
    assert cells.loc["fsdp", "failed_rank"] == 1
    assert cells.loc["ddp", "status"] == "measured"  # its baseline, in the same block


def test_a_rank_that_hangs_is_ended_by_the_time_limit(vitsweep: Command) -> None:
    done = vitsweep(*fault("Hang"), "measurement.timeout_min=0.15", "sweep.baseline=null")

    assert done.returncode == 3, done.stderr
    row = vitsweep.cells().iloc[0]
    assert row["status"] == "timed_out"
    assert "measurement.timeout_min=0.15" in row["reason"]


def test_running_out_of_memory_is_a_result_with_its_peak(vitsweep: Command) -> None:
    done = vitsweep(
        "resources.memory_gib_per_rank=0.1", "batch.images_per_step=8192", "data=synthetic",
        "data.native_resolution_px=32", "sweep.baseline=null",
    )  # fmt: skip

    assert done.returncode == 3, done.stderr
    row = vitsweep.cells().iloc[0]
    assert row["status"] == "out_of_memory"
    assert row["peak_rss_gib"] > 0.1


def test_a_technique_that_computes_something_else_is_wrong_and_never_timed(
    vitsweep: Command,
) -> None:
    scaled = ("memory._target_=tests.faults.Scaled", "optimizer=adamw_foreach")
    vitsweep(*scaled, "measurement.prove=twin")

    row = vitsweep.cells().set_index("optimizer").loc["adamw_foreach"]
    assert row["status"] == "wrong"
    assert "nano twin" in row["reason"]
    assert row.isna()["images_per_second"]


def test_a_loss_that_becomes_infinite_is_diverged(vitsweep: Command) -> None:
    vitsweep("memory._target_=tests.faults.Exploding", "sharding=fsdp")

    row = vitsweep.cells().set_index("sharding").loc["fsdp"]
    assert row["status"] == "diverged"
    assert "inf or NaN" in row["reason"]


def test_a_refused_cell_is_a_row_beside_the_measured_ones(vitsweep: Command) -> None:
    done = vitsweep("-m", "sharding=ddp,hsdp")

    assert done.returncode == 3, done.stderr
    cells = vitsweep.cells().set_index("sharding")
    assert cells.loc["hsdp", "status"] == "invalid"
    assert "sharding=hsdp" in cells.loc["hsdp", "reason"]
    assert cells.loc["ddp", "status"] == "measured"


def test_a_cell_that_failed_is_repeated_by_retry_only(vitsweep: Command) -> None:
    vitsweep(*fault("Raise"), "sweep.baseline=null")
    same = vitsweep(*fault("Raise"), "sweep.baseline=null")
    assert "not repeated" in same.stdout
    assert len(vitsweep.runs()) == 1

    retried = vitsweep("retry", "--status", "failed", quick=False)
    assert retried.returncode == 3, retried.stderr
    assert len(vitsweep.runs()) == 2


def test_ctrl_c_stops_cleanly_and_the_same_command_continues(vitsweep: Command) -> None:
    pair = ("-m", "optimizer=adamw_loop,adamw_foreach", "sweep.baseline=null")
    asked = (*pair, *fault("Slow"), "measurement.blocks=3")
    running = vitsweep.start(*asked)
    wait_for(lambda: any(vitsweep.store.runs()) if vitsweep.store.cells.exists() else False)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=60)

    assert running.returncode == 130
    assert "the same command continues" in out
    before = {run.run_id for run in vitsweep.store.runs()}
    assert 0 < len(before) < 6
    assert vitsweep(*asked).returncode == 0
    runs = vitsweep.runs()
    assert before <= set(runs["run_id"])
    assert runs.groupby("optimizer").size().tolist() == [3, 3]


def test_a_launcher_that_is_killed_leaves_no_rank_behind_and_loses_nothing(
    vitsweep: Command,
) -> None:
    asked = ("-m", "optimizer=adamw_loop,adamw_foreach", *fault("Hang"), "sweep.baseline=null")
    running = vitsweep.start(*asked)
    wait_for(lambda: any(vitsweep.folder.glob("results/default/cells/*/attempts/*/rank1.log")))
    os.kill(running.pid, signal.SIGKILL)
    running.communicate()  # returns when nobody holds the pipes any more

    wait_for(lambda: not ranks_in(vitsweep.folder))
    assert not list(vitsweep.store.runs())


def test_the_same_sweep_started_twice_at_once_runs_no_cell_twice(vitsweep: Command) -> None:
    asked = ("-m", "optimizer=adamw_loop,adamw_foreach", *fault("Slow"), "sweep.baseline=null")
    both = [vitsweep.start(*asked), vitsweep.start(*asked)]
    told = [process.communicate(timeout=200)[0] for process in both]

    assert [p.returncode for p in both] == [0, 0]
    assert sum("waiting for it to end" in text for text in told) == 1
    assert len(list(vitsweep.store.runs())) == 2


def test_a_record_cut_in_half_is_named_and_measured_again(vitsweep: Command) -> None:
    vitsweep("sweep.baseline=null")
    record = next(vitsweep.store.cells.glob("*/runs/*.json"))
    record.write_text(record.read_text()[:200])

    again = vitsweep("sweep.baseline=null")
    assert again.returncode == 0, again.stderr
    assert record.name in again.stderr + again.stdout
    assert (vitsweep.cells()["status"] == "measured").all()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(vitsweep: Command) -> None:
    (vitsweep.folder / "results").write_text("a file where the folder should be")

    refused = vitsweep("sweep.baseline=null")
    assert refused.returncode == 2
    assert "cannot be written" in refused.stderr
    assert "sweep.folder=DIR" in refused.stderr


def wait_for(condition, seconds: float = 120) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def ranks_in(folder: Path) -> list[int]:
    """Processes whose working directory is `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").resolve() == folder:
                found.append(int(process.name))
        except OSError:
            continue
    return found
