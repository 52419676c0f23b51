"""Whatever becomes of a cell on this machine, it is one row with its reason, and no other cell's."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.command import Command, fault
from vitsweep.training.saved import FOLDER, MEASURED

pytestmark = pytest.mark.slow


FAULTS = {
    "raises": (fault("Raise"), "failed", "KeyError: 'a bug in a technique'"),
    "is killed": (fault("Kill"), "killed", "Rank 1 was ended by SIGKILL"),
    "leaves": (fault("Leave"), "failed", "Rank 1 left with exit code 9"),
    "hangs": (
        [*fault("Hang"), "measurement.timeout_min=0.3"],
        "timed_out",
        "measurement.timeout_min=0.3",
    ),
    "eats memory": (
        ["resources.memory_gib_per_rank=0.05", "data=synthetic", "data.native_resolution_px=256"],
        "out_of_memory",
        "allocate",
    ),
    "holds fewer tokens than the others": (
        ["sequence_parallel=ulysses", *fault("Shorter")],
        "failed",
        "has 8 positions on rank 1; 17 positions over 2 ranks are 9 on each, padding included.",
    ),
    "computes something else": (
        ["memory._target_=tests.faults.Scaled", "measurement.prove=twin"],
        "wrong",
        "nano twin",
    ),
    "explodes": (
        ["memory._target_=tests.faults.Exploding"],
        "diverged",
        "inf or NaN",
    ),
    "is refused": (["sharding=hsdp"], "invalid", "at least 2 replicas"),
    "is well": (["optimizer=adamw_foreach"], "measured", ""),
}
"""What happens to a cell: overrides, and the status and reason of its row."""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """One sweep whose cells meet all faults, beside one that is well."""
    vitsweep = Command(tmp_path_factory.mktemp("faults"))
    cells = ",".join(f"""['{"','".join(texts)}']""" for texts, _, _ in FAULTS.values())
    done = vitsweep("-m", f"sweep.cells=[{cells}]")
    assert done.returncode == 3, done.stderr
    return vitsweep


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_happens_to_a_cell_is_its_own_row_with_the_reason(
    faults: Command, name: str
) -> None:
    overrides, status, reason = FAULTS[name]
    row = row_of(faults, overrides)

    assert row["status"] == status
    assert reason in (row["reason"] or "")
    if name in ("raises", "is killed", "leaves", "holds fewer tokens than the others"):
        assert row["failed_rank"] == 1
    assert (row.isna()["images_per_second"]) == (status != "measured")


def test_a_cell_that_ran_out_of_memory_tells_its_peak(faults: Command) -> None:
    assert row_of(faults, FAULTS["eats memory"][0])["peak_rss_gib"] > 0.05


def row_of(vitsweep: Command, overrides: list[str]):  # type: ignore[no-untyped-def]
    """The row of the cell that was asked for with these overrides."""
    store = vitsweep.store
    (cell_id,) = [
        folder.name
        for folder in store.cells.iterdir()
        if set(overrides) <= set(store.frozen(folder.name)["overrides"])
    ]
    return vitsweep.cells().set_index("cell_id").loc[cell_id]


def test_a_cell_that_failed_is_repeated_by_retry_only(vitsweep: Command) -> None:
    vitsweep(*fault("Raise"), "sweep.baseline=null")
    same = vitsweep(*fault("Raise"), "sweep.baseline=null")
    assert "not repeated" in same.stdout
    assert len(vitsweep.runs()) == 1

    vitsweep("sharding=fsdp", "sweep.baseline=null")  # a later command, about another cell
    nothing = vitsweep("retry", "--status", "killed", quick=False)
    assert (nothing.returncode, len(vitsweep.runs())) == (0, 2)
    assert "nothing to run again" in nothing.stdout

    retried = vitsweep("retry", "--status", "failed", quick=False)
    assert retried.returncode == 3, retried.stderr
    assert vitsweep.runs().groupby("status").size().to_dict() == {"failed": 2, "measured": 1}


def test_ctrl_c_stops_cleanly_and_the_same_command_continues(vitsweep: Command) -> None:
    pair = ("-m", "optimizer=adamw_loop,adamw_foreach", "sweep.baseline=null")
    asked = (*pair, *fault("Slow"), "measurement.blocks=3")
    running = vitsweep.start(*asked)
    wait_for(lambda: any(vitsweep.store.runs()) if vitsweep.store.cells.exists() else False)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=240)

    assert running.returncode == 130
    assert "the same command continues" in out
    before = {run.run_id for run in vitsweep.store.runs()}
    assert 0 < len(before) < 6
    assert vitsweep(*asked).returncode == 0
    runs = vitsweep.runs()
    assert before <= set(runs["run_id"])
    assert runs.groupby("optimizer").size().tolist() == [3, 3]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_an_interrupted_training_goes_on_with_the_same_command(
    vitsweep: Command, number: signal.Signals
) -> None:
    asked = ("task=train", "task.epochs=25", "batch.images_per_step=256", "sharding=fsdp")
    running = vitsweep.start(*asked)
    wait_for(lambda: any(vitsweep.store.cells.glob(f"*/attempts/*/{FOLDER}/{MEASURED}")))
    running.send_signal(number)
    out, error = running.communicate(timeout=240)
    assert running.returncode == 130, error
    assert "the same command continues" in out

    again = vitsweep(*asked)
    assert again.returncode == 0, again.stderr
    assert "goes on after step" in again.stdout
    runs = vitsweep.runs().set_index("sharding")
    assert (runs["status"] == "measured").all()
    assert runs["attempt"].sort_values().tolist() == [1, 2]  # with the baseline, in one block
    assert runs["block"].nunique() == 1
    assert (runs["accuracy_top1"] > 0.2).all()
    assert not list(vitsweep.store.cells.glob(f"*/attempts/*/{FOLDER}"))


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


@pytest.mark.full
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
