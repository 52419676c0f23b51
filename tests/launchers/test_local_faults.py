"""Commands on this machine that are interrupted, killed, repeated or started twice lose nothing."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.command import QUICK, SWEEP, Command, Running, fault
from tests.refusals import named, require
from vitsweep.cli.main import run
from vitsweep.execution.rank_processes import SERVER_KILLED
from vitsweep.foreign import read_lines
from vitsweep.results.store import Store
from vitsweep.training.checkpoint_files import CHECKPOINT_FOLDER


@pytest.mark.full
def test_a_cell_that_failed_is_repeated_by_retry_only(vitsweep: Command) -> None:
    vitsweep(*fault("Raise"), "sweep.baseline=null")
    same = vitsweep(*fault("Raise"), "sweep.baseline=null")
    assert "not repeated" in same.stderr
    assert "measured already" not in same.stderr
    assert len(vitsweep.runs()) == 1

    vitsweep("sharding=fsdp", "sweep.baseline=null")  # a later command, about another cell
    nothing = vitsweep("retry", "--status", "killed", quick=False)
    assert (nothing.returncode, len(vitsweep.runs())) == (0, 2)

    retried = vitsweep("retry", "--status", "failed", quick=False)
    assert retried.returncode == 3, retried.stderr
    assert vitsweep.runs().groupby("status").size().to_dict() == {"failed": 2, "measured": 1}


@pytest.mark.slow
def test_a_run_that_is_killed_is_repeated_in_its_block_and_no_pair_is_lost(
    vitsweep: Command,
) -> None:
    both = "sweep.match=[model,data,task,resources,batch,sequence_parallel]"
    done = vitsweep(
        "optimizer=adamw_foreach", both, *fault("KillSecondRun"), "measurement.blocks=3"
    )
    assert done.returncode == 0, done.stderr + done.stdout
    runs = vitsweep.runs()
    assert runs.groupby("status").size().to_dict() == {"killed": 1, "measured": 6}
    measured = runs[runs["status"] == "measured"]
    assert measured.groupby("block")["optimizer"].nunique().tolist() == [2, 2, 2]
    first = runs[runs["position"] == 0]["optimizer"]
    assert set(first) == {"adamw_foreach", "adamw_loop"}, "neither is always first"
    events = [line for p in vitsweep.store.cells.glob("*/attempts.jsonl") for line in read_lines(p)]
    assert [line["event"] for line in events].count("warm_up") == 1

    vitsweep("optimizer=adamw_foreach", both, *fault("KillSecondRun"), "measurement.blocks=3")
    assert len(vitsweep.runs()) == 7


@pytest.mark.slow
def test_sigterm_and_ctrl_c_stop_cleanly_and_the_same_command_continues(vitsweep: Command) -> None:
    """The second run of the first command and that of the next are held until they are stopped."""
    pair = ("-m", "optimizer=adamw_loop,adamw_foreach", "sweep.baseline=null")
    asked = (*pair, *fault("Held"), "measurement.blocks=2", "sweep.report=true")
    running = held(vitsweep, 1, *asked)
    running.send_signal(signal.SIGTERM)  # some seconds are left until the process is killed
    out, error = running.communicate(timeout=400)
    assert running.returncode == 143, error
    assert "Stopping" in error
    assert "img/s" in out, "the table"
    assert "`vitsweep collect default` writes" in out
    assert "same command" in error
    assert not list(vitsweep.store.root.glob("*.parquet"))
    assert not (vitsweep.store.root / "report").exists()
    assert vitsweep("collect", SWEEP, quick=False).returncode == 0
    assert len(vitsweep.cells()) == 2

    running = held(vitsweep, 2, *asked)
    running.send_signal(signal.SIGINT)
    out, error = running.communicate(timeout=400)
    assert running.returncode == 130
    assert "same command" in error
    assert re.search(r"^Stopped after 1 of 3 runs\.$", out, re.MULTILINE)
    assert "measurement.blocks=" not in out.split("Stopped", 1)[1], "it is what was typed"
    before = {run.run_id for run in vitsweep.store.runs()}
    assert len(before) == 2

    (vitsweep.folder / "allowed").write_text("99")
    assert vitsweep(*asked).returncode == 0
    runs = vitsweep.runs()
    assert before <= set(runs["run_id"])
    assert runs.groupby("optimizer").size().tolist() == [2, 2]


def held(vitsweep: Command, allowed: int, *asked: str, quick: bool = True) -> Running:
    """Start a command of cells with the fault `Held`; return it when a run waits."""
    (vitsweep.folder / "allowed").write_text(str(allowed))
    (vitsweep.folder / "held").unlink(missing_ok=True)
    running = vitsweep.fork(*asked, quick=quick)
    wait_for((vitsweep.folder / "held").exists)
    return running


@pytest.mark.full
def test_retry_ends_with_the_command_that_sigterm_stops(vitsweep: Command) -> None:
    for question in "ab":  # a command of retry for each
        failing = (*fault("Raise"), "sweep.baseline=null", f"sweep.question={question}")
        vitsweep(*failing, f"optimizer=adamw_{'loop' if question == 'a' else 'foreach'}")
    before = set(vitsweep.store.cell_ids())
    more = "sequence_parallel._target_=tests.faults.Held"
    running = held(vitsweep, 3, "retry", "--set", more, "measurement.blocks=9", quick=False)
    assert any(run.status == "measured" for run in vitsweep.store.runs())
    running.send_signal(signal.SIGTERM)
    out, error = running.communicate(timeout=400)
    assert running.returncode == 143, out + error
    assert len(set(vitsweep.store.cell_ids()) - before) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.full)],
)
def test_an_interrupted_training_goes_on_with_the_same_command(
    vitsweep: Command, number: signal.Signals, code: int
) -> None:
    both = "sweep.match=[model,data,task,resources,batch,memory]"
    held = ("memory._target_=tests.faults.HeldTraining", both)
    training = ("task=train", "task.epochs=5", "batch.images_per_step=256", "sharding=fsdp")
    asked = (*training, *held)
    running = vitsweep.fork(*asked)
    wait_for((vitsweep.folder / "held").exists)
    running.send_signal(number)
    _, error = running.communicate(timeout=400)
    assert running.returncode == code, error
    assert re.search(r"saved .*\d", error)
    assert "same command" in error

    again = vitsweep(*asked)
    assert again.returncode == 0, again.stderr
    runs = vitsweep.runs().set_index("sharding")
    assert (runs["status"] == "measured").all()
    assert runs["attempt"].sort_values().tolist() == [1, 2]  # with the baseline, in one block
    assert runs["block"].nunique() == 1
    assert runs["accuracy_top1"].notna().all()
    assert not list(vitsweep.store.cells.glob(f"*/attempts/*/{CHECKPOINT_FOLDER}"))


@pytest.mark.full
def test_an_interrupted_training_goes_on_as_another_cell_under_another_sharding(
    vitsweep: Command,
) -> None:
    training = ("task=train", "task.epochs=25", "batch.images_per_step=256", "sweep.baseline=null")
    running = vitsweep.fork(*training, "sharding=fsdp", "memory._target_=tests.faults.HeldTraining")
    wait_for((vitsweep.folder / "held").exists)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=400)
    [folder] = vitsweep.store.cells.iterdir()

    zero1 = (*training, "sharding=zero1", "resources.ranks_per_node=1")
    done = vitsweep(*zero1, f"task.resume_from={folder}")
    assert done.returncode == 0, done.stderr
    [run] = vitsweep.store.runs()
    assert "saved by 2 ranks (sharding=fsdp, shard=2)" in run.environment["resumed"]
    assert "read by 1 rank (sharding=zero1)" in run.environment["resumed"]
    assert len(run.samples["training"]) == 25
    refused = vitsweep(*zero1, f"task.resume_from={folder}", "model.depth=1")
    assert {"`model.depth=2`", "`model.depth=1`"} <= named(refused.stdout + refused.stderr)


@pytest.mark.full
def test_a_killed_training_goes_on_from_its_latest_checkpoint_and_ends_as_without(
    vitsweep: Command,
) -> None:
    training = (
        "task=train", "task.epochs=4", "batch.images_per_step=128", "sharding=fsdp",
        "task.checkpoint_minutes=0.0001", "sweep.baseline=null",
        "memory._target_=tests.faults.KilledTraining",
    )  # fmt: skip
    done = vitsweep(*training)
    assert done.returncode == 0, done.stderr + done.stdout
    runs = vitsweep.runs().set_index("status")
    assert sorted(runs.index) == ["killed", "measured"]
    assert re.search(r" [1-9]\d* steps", runs.loc["measured", "resumed"])
    assert not list(vitsweep.store.cells.glob(f"*/attempts/*/{CHECKPOINT_FOLDER}"))

    whole = vitsweep(
        *training, "sweep.remeasure=true", "sweep.name=whole"
    )  # it is killed only once
    assert whole.returncode == 0, whole.stderr
    curves = [
        [(point["epoch"], point["accuracy_top1"]) for point in run.samples["training"]]
        for sweep in ("whole", vitsweep.store.name)
        for run in Store(vitsweep.store.root.parent / sweep).runs()
        if run.samples.get("training")
    ]
    assert len(curves) == 2
    assert curves[0] == curves[1]


@pytest.mark.slow
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


@pytest.mark.full
def test_a_run_whose_fork_server_is_killed_is_killed_and_repeated(vitsweep: Command) -> None:
    target = "sequence_parallel._target_=tests.launchers.slurm.faults.HangOnce"
    marker = vitsweep.folder / "struck"
    asked = (target, "+sequence_parallel.rank=1", f"+sequence_parallel.marker={marker}")
    running = vitsweep.start(*asked, "sweep.baseline=null")
    wait_for(marker.exists)
    for process in psutil.Process(running.pid).children():
        if "multiprocessing.forkserver" in " ".join(process.cmdline()):
            process.kill()
    out, error = running.communicate(timeout=400)

    assert running.returncode == 0, out + error
    ends = {str(run.status): run.reason for run in vitsweep.store.runs()}
    assert ends == {"killed": SERVER_KILLED, "measured": ""}
    assert not ranks_in(vitsweep.folder)
    assert vitsweep.cells()["status"].tolist() == ["measured"]


@pytest.mark.full
def test_the_same_sweep_started_twice_at_once_runs_no_cell_twice(vitsweep: Command) -> None:
    asked = ("-m", "optimizer=adamw_loop,adamw_foreach", *fault("Held"), "sweep.baseline=null")
    first, log = held(vitsweep, 0, *asked), vitsweep.folder / "second.log"
    second = vitsweep.start(*asked, log=log)
    wait_for(lambda: "waiting" in log.read_text())
    (vitsweep.folder / "allowed").write_text("99")
    told = "".join(first.communicate(timeout=400))
    assert "waiting" not in told

    assert (first.returncode, second.wait(400)) == (0, 0)
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


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("results").write_text("a file where the folder should be")
    assert run([*QUICK, "sweep.baseline=null"]) == 2
    said = capsys.readouterr().err
    require(said.strip(), "`sweep.folder=DIR`")


def wait_for(condition, seconds: float = 400) -> None:  # type: ignore[no-untyped-def]
    """Wait for an event; the limit only ends a test that hangs."""
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


@pytest.mark.slow
def test_a_budget_that_ends_before_anything_is_decided_says_how_to_go_on(vitsweep: Command) -> None:
    """Three blocks of four cells take longer on any machine, although a budget cuts their windows."""
    optimizers = "optimizer=adamw_loop,adamw_foreach,adamw_fused,adamw_contiguous"
    grid = (optimizers, "measurement=standard", "measurement.prove=none")
    done = vitsweep("-m", *grid, "sweep.prune_slowdown=null", "sweep.minutes=0.05")
    assert "`sweep.minutes`" in done.stderr
    assert list(vitsweep.store.runs()), "what ended in time is kept"
