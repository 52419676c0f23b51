"""`hydra/launcher=slurm` on real daemons: what Hydra's stock launcher gets wrong, done right."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.canaries import plant
from tests.cli.test_current_folder import OWN, TYPED
from tests.command import NO_REPORT, QUICK, ROOT, Command, fault
from tests.launchers.slurm.conftest import SlurmClient, eventually
from tests.launchers.slurm.sweeps import HOLD, SMALL, Held, Sweep, hang
from vitsweep.foreign import read_lines
from vitsweep.results.pack import FILE


@pytest.fixture
def sweep(vitsweep: Command, slurm_environ: SlurmClient) -> Iterator[Sweep]:
    yield Sweep(vitsweep, slurm_environ)
    slurm_environ.cancel_all()


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2,), marks=pytest.mark.slow),
        pytest.param((1, 2, 4), marks=pytest.mark.full),
    ],
)
def test_resources_follow_the_cell(sweep: Sweep, sizes: tuple[int, ...]) -> None:
    every_core = "resources.threads_per_rank=auto"  # of the node's four, of which there may be two
    ranks = f"resources.ranks_per_node={2 if 1 in sizes else 1}"
    nodes_asked = f"resources.nodes={','.join(map(str, sizes))}"
    cells = sweep.run(nodes_asked, ranks, "sharding=ddp,fsdp", every_core)

    assert cells.groupby(["nodes", "sharding"]).size().to_dict() == {
        (nodes, sharding): 1 for nodes in sizes for sharding in ("ddp", "fsdp")
    }
    assert (cells["status"] == "measured").all()
    shared = cells["nodes"] * 4 > (os.cpu_count() or 1)
    assert cells["oversubscribed"].tolist() == ((cells["nodes"] > 1) | shared).tolist()
    for array in sweep.arrays:
        facts = sweep.client.detail(f"{array.slurm_id}_0")
        assert facts["NumNodes"] == str(array.facts["request"]["nodes"])
    used = cells.set_index(["nodes", "sharding"])["nodes_used"]
    assert len(used[sizes[-1], "fsdp"].split(",")) == sizes[-1]
    own = cells[cells["sharding"] == "ddp"]
    assert (own["cell_id"] == own["baseline_cell_id"]).all()
    assert cells.loc[cells["sharding"] == "fsdp", "num_pairs"].eq(1).all()


@pytest.mark.full
def test_a_job_warms_its_node_up_before_it_compares_cells(sweep: Sweep) -> None:
    cells = sweep.run("sharding=ddp,fsdp", "measurement.blocks=3")
    assert cells["blocks"].tolist() == [3, 3]
    kinds = sweep.events.of_kind("warm_up_start", "warm_up_end", "run_start")
    assert [event["event"] for event in kinds] == [
        "warm_up_start",
        "warm_up_end",
        *["run_start"] * 6,
    ]
    store = sweep.command.store
    attempts = [
        line
        for cell in cells["cell_id"]
        for line in read_lines(store.cell(cell) / "attempts.jsonl")
    ]
    [warm_up] = [line for line in attempts if line["event"] == "warm_up"]
    assert warm_up["status"] == "measured"
    assert warm_up["job"] == sweep.job
    assert len(list(store.runs())) == 6, "what it measured is discarded"
    assert not list(store.root.rglob("warm_up*"))


@pytest.mark.full
def test_a_pending_cell_runs_what_was_typed_not_what_files_say_later(sweep: Sweep) -> None:
    mine = sweep.command.folder / "conf" / "batch" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text(
        "images_per_step: 16\nscope: total\naccumulation_steps: 1\nresolution_px: auto\n"
    )
    path = f"hydra.searchpath=[file://{sweep.command.folder / 'conf'}]"
    sweep.submit("batch=mine", path, "sharding=ddp", HOLD)
    mine.write_text(mine.read_text().replace("16", "64"))
    sweep.client.run("scontrol", "release", sweep.job)

    assert sweep.until_ended()["images_per_step"].tolist() == [16]


@pytest.mark.slow
def test_a_node_needs_no_key_and_runs_no_cell_that_was_changed(sweep: Sweep) -> None:
    """Of the cells of two jobs the second is changed while they wait."""
    held_out = "task.held_out=tests.user_modules.confidences"
    text = ("task=train", "task.epochs=1", held_out, "sweep.baseline=null", HOLD)
    homeless = "hydra.launcher.setup=['export HOME=/proc XDG_CACHE_HOME=/proc']"
    [array] = sweep.submit(*text, "seed=1,2", homeless, "hydra.launcher.cells_per_job=1")
    files = [sweep.command.store.cell(c) / "cell.yaml" for c in sweep.command.store.cell_ids()]
    [changed] = [path for path in files if re.search("^  seed: 2$", path.read_text(), re.M)]
    changed.write_text(changed.read_text().replace("learning_rate: ", "learning_rate: 1"))
    for job in array.jobs():
        sweep.client.run("scontrol", "release", job.slurm_id)
    cells = sweep.until_ended().set_index("seed")
    assert cells.loc[1, "status"] == "measured"
    assert cells.loc[2, "status"] != "measured"
    assert "/cell.yaml`" in cells.loc[2, "reason"]


@pytest.mark.full
def test_texts_arrive_as_typed_and_nothing_is_executed(sweep: Sweep, tmp_path: Path) -> None:
    text = f'it\'s; $(touch {tmp_path}/struck) `touch {tmp_path}/struck` "a  b" & # c'
    quoted = text.replace("'", "\\'")
    sweep.submit(
        "sharding=ddp", HOLD, f"+hydra.launcher.additional_parameters.comment='{quoted}'",
        "hydra.launcher.setup=['export VITSWEEP_TOLD=\"a; b  $HOME\"']",
    )  # fmt: skip

    assert sweep.client.run("squeue", "-h", "-t", "all", "-j", sweep.job, "-o", "%k") == text
    [script] = sweep.arrays[0].folder.glob("*submission.sh")
    assert 'export VITSWEEP_TOLD="a; b  $HOME"' in script.read_text().splitlines()
    refused = sweep.command(
        "-m",
        "seed=1",
        *SMALL,
        "hydra.launcher.partition='no such; $(id)'",
        "hydra.launcher.site.cores_per_node=4",
    )
    assert refused.returncode == 2
    assert "Slurm refuses" in refused.stderr
    assert not (tmp_path / "struck").exists()


@pytest.mark.full
def test_no_secret_of_the_environment_is_written(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-of-the-user")
    sweep.submit("sharding=ddp", HOLD)
    of_slurm = list((sweep.client.cluster.folder.root / "slurmctld").rglob("environment*"))
    assert of_slurm, "Slurm keeps the environment with the job"
    shown = sweep.client.run("scontrol", "show", "job", "--details", sweep.job)
    shown += sweep.client.run("scontrol", "write", "batch_script", sweep.job, "-")
    assert "s3cr3t-of-the-user" not in shown
    sweep.client.run("scontrol", "release", sweep.job)
    assert sweep.until_ended()["status"].tolist() == ["measured"]

    of_sweep = [path for path in sweep.command.store.root.rglob("*") if path.is_file()]
    assert len(of_sweep) > 8
    kept = {path: path.read_bytes() for path in [*of_slurm, *of_sweep] if path.exists()}
    assert not [path for path, text in kept.items() if b"s3cr3t-of-the-user" in text]


@pytest.mark.full
def test_ctrl_c_detaches_and_says_how_to_come_back(sweep: Sweep) -> None:
    running = sweep.command.start("-m", *hang(), *SMALL)
    sweep.until_running()
    running.send_signal(signal.SIGINT)
    out, error = running.communicate(timeout=300)

    assert running.returncode == 130, error
    assert "vitsweep status default --watch" in error
    assert sweep.client.states(sweep.job) == ["RUNNING"]
    watching = sweep.command.start("status", "--watch", quick=False)
    sweep.client.run("scancel", sweep.job)
    out, error = watching.communicate(timeout=300)
    assert watching.returncode == 3, error
    assert "killed 1" in out


def test_a_folder_that_is_renamed_under_a_job_ends_it_in_words_and_is_not_made_again(
    sweep: Sweep,
) -> None:
    held = Held(sweep.command.folder)
    asked = [*held.cell, "sharding=ddp,fsdp", "sweep.baseline=null"]
    submitter = sweep.command.fork("-m", *SMALL, *asked)
    eventually(held.is_waiting, 400, "the run")
    root, job = sweep.command.store.root, sweep.job
    moved = root.rename(root.with_name("moved"))
    held.go_on()
    out, error = submitter.communicate(timeout=400)
    assert submitter.returncode == 2
    gone = f"results/{root.name}` is gone"
    assert gone in " ".join((out + error).split())
    sweep.client.wait(job, "FAILED", seconds=400)
    [log] = moved.glob("jobs/*/*_log.out")
    assert gone in log.read_text()
    assert not root.exists()


@pytest.mark.full
def test_retry_runs_failed_cells_again_on_the_cluster(sweep: Sweep) -> None:
    sweep.run(*fault("Raise"), "sharding=fsdp", "sweep.baseline=null", code=3)
    more = ("--status", "failed", "--set", "resources.ranks_per_node=1", "hydra.launcher.wait=true")
    done = sweep.command("retry", *more, quick=False)

    assert done.returncode == 0, (
        done.stdout + done.stderr
    )  # with one rank there is no rank 1 to fail
    cells = sweep.command.cells().set_index("world_size")["status"].to_dict()
    assert cells == {1: "measured", 2: "failed"}


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["submitit_local", "submitit_slurm"])
def test_stock_launchers_still_work(sweep: Sweep, launcher: str) -> None:
    own = ["hydra.launcher.tasks_per_node=2"] if launcher == "submitit_slurm" else []
    done = sweep.command(
        "-m", "sharding=ddp", f"hydra/launcher={launcher}", "hydra.launcher.timeout_min=20",
        "resources.threads_per_rank=1", *own,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [str(run.status) for run in sweep.command.store.runs()] == ["measured"]


@pytest.mark.full
def test_a_finished_run_is_noticed_within_seconds(sweep: Sweep) -> None:
    sweep.submit("sharding=ddp", "sweep.baseline=null")
    eventually(lambda: any(sweep.command.store.runs()), 400, "a record")
    # a heartbeat would tell it after 30 s
    eventually(lambda: bool(sweep.events.of_kind("run_end")), 20, "its event")


PACKING = f"""
from vitsweep.cli import main

line = {["-m", *SMALL, *QUICK, NO_REPORT, "sweep.name=default", "sweep.baseline=null"]}
line += ["seed=0,1,2", "resources.ranks_per_node=1", "hydra.launcher.cells_per_job=1"]
for blocks in (1, 2):
    assert main.run([*line, f"measurement.blocks={{blocks}}"]) == 0
    assert main.run(["pack", "default"]) == 0
"""


@pytest.mark.full
def test_packed_cells_run_again(sweep: Sweep) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PACKING],
        cwd=sweep.command.folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    store = sweep.command.store
    assert [path.name for path in store.cells.iterdir()] == [FILE], done.stdout
    assert [str(run.status) for run in store.runs()] == ["measured"] * 6
    assert [len([*store.runs(cell_id)]) for cell_id in store.cell_ids()] == [2, 2, 2]


@pytest.mark.full
@pytest.mark.parametrize("python", [("-P",), ()])
def test_jobs_find_own_code_where_the_command_does(sweep: Sweep, python: tuple[str, ...]) -> None:
    folder = sweep.command.folder
    canary = plant(folder) if python else folder / "canary"
    (folder / "own_code.py").write_text(OWN)
    words = [w for w in QUICK if not w.startswith("model.")]
    running = sweep.command.start(
        "-m", *SMALL, *words, *TYPED, "sweep.baseline=null", quick=False, python=python
    )
    out, error = running.communicate(timeout=500)
    assert running.returncode == 0, out + error
    assert sweep.command.cells()["status"].tolist() == ["measured"]
    assert not canary.exists(), canary.read_text()
