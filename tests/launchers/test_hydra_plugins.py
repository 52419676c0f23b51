"""vitsweep's sweeper and launcher inside Hydra, beside Hydra's own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra

from tests.command import Command
from tests.refusals import require
from vitsweep.api.session import Session
from vitsweep.cli.cells import read_line
from vitsweep.cli.hydra_detour import (
    _for_hydra,
    hide_from_hydra,
    running_cell,
)
from vitsweep.cli.main import run
from vitsweep.composition import hydra
from vitsweep.composition.composer import ComposedCell
from vitsweep.launchers.base import LaunchRequest, LaunchResult
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.store import Store
from vitsweep.spec.menu import conf_dir


class Calls:
    """Stands in for what vitsweep's launchers call, and for the task of a stock one."""

    def __init__(self) -> None:
        self.requests: list[LaunchRequest] = []
        self.planned: list[SweepPlan] = []
        self.tasks: list[ComposedCell] = []

    @contextmanager
    def launch(self, request: LaunchRequest) -> Iterator[LaunchResult]:
        self.requests.append(request)
        yield LaunchResult(store=Store(request.settings.path), plan=SweepPlan({}))

    def summarize(self, *_: object, **__: object) -> list[dict[str, Any]]:
        return [
            {"status": "measured", "images_per_second": 10.0 * cell.tree["seed"] or None}
            for cell in self.cells
        ]

    @property
    def cells(self) -> list[ComposedCell]:
        [request] = self.requests
        return [entry.composed for entry in request.plan.named]

    def plan(self, session: Session, **_: Any) -> list[dict[str, Any]]:
        self.planned.append(session.plan)
        return [{"state": "runnable"} for _ in session.cells]

    def task(self, config: Any) -> float:
        self.tasks.append(running_cell()[0])
        return 0.0

    def multirun(self, *overrides: str) -> Any:
        hydra.open_loader(conf_dir())
        search_path = create_config_search_path(str(conf_dir()))
        main = Hydra.create_main_hydra2("vitsweep", search_path)
        return main.multirun("config", self.task, list(overrides), with_log_configuration=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Calls]:
    calls = Calls()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitsweep.launchers.local.launch", calls.launch)
    monkeypatch.setattr("vitsweep.cli.summary.summarize", calls.summarize)
    monkeypatch.setattr("vitsweep.api.plan.plan", calls.plan)
    yield calls
    GlobalHydra.instance().clear()


def test_the_local_launcher_gets_all_cells_at_once(calls: Calls, tmp_path: Path) -> None:
    calls.multirun("precision=O1,O2", "seed=1,2", "sweep.name=mine")
    [request] = calls.requests
    cells = calls.cells
    assert [cell.overrides[:2] for cell in cells][1] == ("precision=O1", "seed=2")
    assert request.settings.name == "mine"
    assert not list(tmp_path.iterdir())


def test_a_plan_launches_nothing(calls: Calls) -> None:
    assert run(["plan", "-m", "seed=1,2", "--no-predict"]) == 0
    assert (len(calls.planned[0].entries), calls.requests) == (2, [])


def test_a_stock_launcher_runs_the_task_of_each_cell(calls: Calls, tmp_path: Path) -> None:
    calls.multirun("seed=1,2", "precision=O1", "hydra/launcher=basic", "hydra.job.name=x")
    assert [cell.overrides for cell in calls.tasks] == [
        ("seed=1", "precision=O1", "sweep.name=vit_nano-precision-seed"),
        ("seed=2", "precision=O1", "sweep.name=vit_nano-precision-seed"),
    ]
    assert [cell.tree["precision"]["name"] for cell in calls.tasks] == ["O1", "O1"]
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_no_other_sweeper_is_given_cells(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        calls.multirun("seed=0,3", "hydra/sweeper=basic")
    said = capsys.readouterr().err
    assert all(name in said for name in ("`hydra/launcher`", "`python -m vitsweep`"))
    assert not calls.requests


FOREIGN = """
import hydra
@hydra.main(config_path=None, version_base="1.3")
def main(config): pass
main()
"""


@pytest.mark.parametrize("choice", ["hydra/launcher=slurm", "hydra/sweeper=vitsweep"])
def test_another_application_is_reported_in_a_sentence(choice: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(FOREIGN)
    path = f"hydra.searchpath=[file://{conf_dir()}]"
    words = [sys.executable, "app.py", "-m", choice, path, "+a=1,2"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (2, "")
    group = choice.partition("=")[0]
    require(done.stderr.rstrip(), f"`{group}` `python -m vitsweep`")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["-m", "--cfg", "job"], "Only one of --run, --multirun, --cfg, --info"),
        (["--experimental-rerun", "x"], "File x does not exist!"),
    ],
)
def test_what_hydra_refuses_is_a_sentence(typed: list[str], words: str, tmp_path: Path) -> None:
    done = Command(tmp_path)(*typed, quick=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f": {words}" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_is_hydras_default(calls: Calls) -> None:
    assert read_line(["--run", "precision=O1"]).overrides == ["precision=O1"]
    assert read_line(["-r", "precision=O1"]).of_hydra == ""
    assert "--run" not in _for_hydra(["--run", "hydra/launcher=basic"])


def test_a_tab_in_a_yaml_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "precision" / "tabbed.yaml"
    file.parent.mkdir()
    file.write_text("# One\ndtype: float32\n\ttf32: true\n")
    assert run(["plan", "--config-dir", str(tmp_path), "precision=tabbed", "--no-predict"]) == 2
    said = capsys.readouterr().err
    require(said.rstrip(), f"`precision/tabbed` `{tmp_path}` 3")
    assert " tab " in said


def test_stock_submitit_is_refused_what_it_would_ignore(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    for launcher in ("submitit_local", "submitit_slurm"):
        GlobalHydra.instance().clear()
        with pytest.raises(SystemExit, match="2"):
            calls.multirun("resources.nodes=1,2", f"hydra/launcher={launcher}")
        said = capsys.readouterr().err
        assert "`resources.nodes`" in said
        assert "hydra/launcher=slurm" in said


def test_stock_submitit_without_slurm_ends_in_a_sentence(
    calls: Calls,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for command in ("sbatch", "srun"):
        (tmp_path / command).write_text("#!/bin/sh\necho no such cluster >&2; exit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(SystemExit, match="2"):
        calls.multirun("precision=O1,O2", "hydra/launcher=submitit_slurm")
    assert "no such cluster" in capsys.readouterr().err


def test_a_mistake_ends_with_a_sentence_and_status_2(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        calls.multirun("precision=O1,o2")
    assert "`precision=O1,O2`" in capsys.readouterr().err


def test_hidden_overrides_reach_the_cells_as_typed(calls: Calls) -> None:
    typed = [
        "precision=O1,O2",
        "precision.loss_scale=128",
        "model=module",
        "model.target=torch.nn.Flatten",
        "++model.arguments.note='a, b'",
        "sweep.name=mine",
    ]
    typed += ["++model.arguments.shape=[1,2]"]
    typed += ["resources.memory_gib_per_rank=null", "++model.arguments.empty="]
    calls.multirun(*hide_from_hydra(typed))
    [request] = calls.requests
    cells = calls.cells
    assert [cell.tree["precision"]["loss_scale"] for cell in cells] == [128, 128]
    arguments = {"note": "a, b", "shape": [1, 2], "empty": ""}
    assert cells[0].tree["model"]["arguments"] == arguments
    assert len(cells) == 2
    assert cells[0].tree["resources"]["memory_gib_per_rank"] is None
    assert request.settings.name == "mine"


def test_nothing_is_hidden_that_hydra_must_read() -> None:
    assert hide_from_hydra(["seed=1,2", "~memory"]) == ["seed=1,2", "~memory"]


def test_flags_that_show_something_reach_hydra_as_typed() -> None:
    arguments = ["-m", "seed=1", "--cfg", "job"]
    assert _for_hydra(arguments) == arguments
    arguments = ["-m", "seed=1", "--config-dir", "mine", "~memory"]
    assert _for_hydra(arguments) == [
        "--multirun", "--config-dir", "mine", "seed=choice(1)", "~memory"
    ]  # fmt: skip


def test_the_plugins_load_next_to_nothing() -> None:
    code = (
        "import sys; from hydra_plugins.vitsweep_launchers import plugin; "
        "print([m for m in ('torch', 'vitsweep', 'pandas', 'submitit', 'rich') if m in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"
