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

from vitsweep.api.session import Session
from vitsweep.cli.hydra_detour import (
    _for_hydra,
    hide_from_hydra,
    running_cell,
)
from vitsweep.cli.main import run
from vitsweep.composition import hydra
from vitsweep.composition.composer import ComposedCell
from vitsweep.errors import VitsweepError
from vitsweep.launchers.base import LaunchRequest, LaunchResult
from vitsweep.launchers.settings import LocalSettings
from vitsweep.planning.freeze import store_of
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.spec.menu import conf_dir


class Calls:
    """Stands in for what vitsweep's launchers call, and for the task of a stock one."""

    def __init__(self) -> None:
        self.requests: list[LaunchRequest] = []
        self.planned: list[SweepPlan] = []
        self.tasks: list[ComposedCell] = []
        self.settings: list[LocalSettings] = []

    @contextmanager
    def launch(self, request: LaunchRequest, settings: LocalSettings) -> Iterator[LaunchResult]:
        self.requests.append(request)
        self.settings.append(settings)
        yield LaunchResult(store=store_of(request.settings), plan=SweepPlan({}))

    def summarize(self, *_: object, **__: object) -> list[dict[str, Any]]:
        return [
            {"status": "measured", "images_per_second": 10.0 * cell.tree["seed"] or None}
            for cell in self.cells
        ]

    @property
    def cells(self) -> list[ComposedCell]:
        [request] = self.requests
        entries = request.plan.entries.values()
        return [entry.composed for entry in entries if not entry.is_added_baseline]

    def plan(self, session: Session, _: Any) -> list[dict[str, Any]]:
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
    calls.multirun("precision=O1,O2", "seed=1,2", "hydra.launcher.parallel=2", "sweep.name=mine")
    [request] = calls.requests
    cells = calls.cells
    assert [cell.overrides[:2] for cell in cells][1] == ("precision=O1", "seed=2")
    assert calls.settings[0].parallel == 2
    assert request.settings.name == "mine"
    assert not list(tmp_path.iterdir())


def test_a_plan_launches_nothing(calls: Calls) -> None:
    assert run(["plan", "-m", "seed=1,2", "--no-predict"], {}) == 0
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
    with pytest.raises(VitsweepError, match="vitsweep has one sweeper, its own"):
        calls.multirun("seed=0,3", "hydra/sweeper=basic")
    assert not calls.requests


def test_stock_submitit_is_refused_what_it_would_ignore(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        calls.multirun("resources.nodes=1,2", "hydra/launcher=submitit_local")
    assert "`resources.nodes` vary over the cells" in capsys.readouterr().err


def test_a_mistake_ends_with_a_sentence_and_status_2(
    calls: Calls, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        calls.multirun("precision=O1,o2")
    assert "Did you mean `precision=O2`?" in capsys.readouterr().err


def test_hidden_overrides_reach_the_cells_as_typed(calls: Calls) -> None:
    typed = [
        "precision=O1,O2",
        "precision.loss_scale=128",
        "model=module",
        "model.target=torch.nn.Flatten",
        "++model.arguments.note='a, b'",
        "sweep.name=mine",
    ]
    typed += ["++model.arguments.shape=[1,2]", "hydra.launcher.parallel=3"]
    typed += ["resources.memory_gib_per_rank=null", "++model.arguments.empty="]
    calls.multirun(*hide_from_hydra(typed))
    [request] = calls.requests
    cells = calls.cells
    assert [cell.tree["precision"]["loss_scale"] for cell in cells] == [128, 128]
    arguments = {"note": "a, b", "shape": [1, 2], "empty": ""}
    assert cells[0].tree["model"]["arguments"] == arguments
    assert len(cells) == 2
    assert cells[0].tree["resources"]["memory_gib_per_rank"] is None
    assert calls.settings[0].parallel == 3
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
        "import sys; from hydra_plugins.vitsweep_launchers import sweeper, local; "
        "print([m for m in ('torch', 'vitsweep', 'pandas', 'submitit', 'rich') if m in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"
