"""vitsweep's sweeper and launcher inside Hydra, beside Hydra's own."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from vitsweep.cli.hydra_detour import (
    _for_hydra,
    hide_from_hydra,
    running_cell,
    with_optuna_defaults,
)
from vitsweep.cli.main import run
from vitsweep.composition import hydra
from vitsweep.composition.composer import ComposedCell
from vitsweep.errors import VitsweepError
from vitsweep.launchers.base import LaunchRequest, LaunchResult
from vitsweep.launchers.local import LocalSettings
from vitsweep.planning.freeze import store_of
from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.spec.menu import conf_dir


class Calls:
    """Stands in for what vitsweep's launchers call, and for the task of a stock one."""

    def __init__(self) -> None:
        self.requests: list[LaunchRequest] = []
        self.planned: list[list[ComposedCell]] = []
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
            for cell in self.requests[-1].cells
        ]

    def plan(self, cells: list[ComposedCell], *_: Any) -> list[dict[str, Any]]:
        self.planned.append(cells)
        return [{"state": "runnable"} for _ in cells]

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
    cells = request.cells
    assert [cell.overrides[:2] for cell in cells][1] == ("precision=O1", "seed=2")
    assert calls.settings[0].parallel == 2
    assert request.settings.name == "mine"
    assert not list(tmp_path.iterdir())


def test_a_plan_launches_nothing(calls: Calls) -> None:
    assert run(["plan", "-m", "seed=1,2", "--no-predict"], {}) == 0
    assert (len(calls.planned[0]), calls.requests) == (2, [])


def test_a_stock_launcher_runs_the_task_of_each_cell(calls: Calls, tmp_path: Path) -> None:
    calls.multirun("seed=1,2", "precision=O1", "hydra/launcher=basic", "hydra.job.name=x")
    assert [cell.overrides for cell in calls.tasks] == [
        ("seed=1", "precision=O1", "sweep.name=vit_nano-precision-seed"),
        ("seed=2", "precision=O1", "sweep.name=vit_nano-precision-seed"),
    ]
    assert [cell.tree["precision"]["name"] for cell in calls.tasks] == ["O1", "O1"]
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_a_stock_sweeper_is_told_the_objective(calls: Calls) -> None:
    [returned] = calls.multirun("seed=0,3", "hydra/sweeper=basic")
    values = [job.return_value for job in returned]
    assert values == [None, 30.0], "the first was not measured"


def test_equal_trials_of_a_batch_are_one_cell_and_each_gets_its_objective(calls: Calls) -> None:
    [returned] = calls.multirun("seed=3,2,3", "hydra/sweeper=basic")
    assert [job.return_value for job in returned] == [30.0, 20.0, 30.0]
    assert len(calls.requests[-1].cells) == 2


@pytest.mark.filterwarnings("ignore")  # optuna 2 was written before this Python and SQLAlchemy
def test_optuna_maximizes_and_goes_on_after_a_cell_that_is_not_measured(
    calls: Calls, tmp_path: Path
) -> None:
    typed = [
        "hydra/sweeper=optuna",
        "hydra/sweeper/sampler=random",
        "hydra.sweeper.sampler.seed=3",  # draws 3, 5, 3, 5, 5, 0
        "hydra.sweeper.n_trials=6",
        "seed=choice(0,3,5)",
    ]
    calls.multirun(*with_optuna_defaults(typed), f"hydra.sweep.dir={tmp_path}")
    assert {c.tree["seed"] for r in calls.requests for c in r.cells} == {0, 3, 5}
    best = OmegaConf.load(tmp_path / "optimization_results.yaml")
    assert best == {"name": "optuna", "best_params": {"seed": 5}, "best_value": 50.0}


def test_what_is_typed_comes_after_the_defaults_for_optuna() -> None:
    typed = ["hydra/sweeper=optuna", "hydra.sweeper.direction=minimize"]
    arguments = with_optuna_defaults(typed)
    assert arguments[0] == "hydra.sweeper.direction=maximize"
    assert arguments[-2:] == typed
    assert with_optuna_defaults(["seed=1"]) == ["seed=1"]


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({}, "needs hydra-optuna-sweeper: `pip install 'vitsweep[optuna]'`"),
        ({"hydra-optuna-sweeper": "1.3.0"}, "needs optuna: `pip install 'vitsweep[optuna]'`"),
        (
            {"hydra-optuna-sweeper": "1.3.0", "optuna": "4.5.0"},
            "works with optuna 2, and optuna 4.5.0 is installed: `pip install 'vitsweep[optuna]'`",
        ),
    ],
)
def test_optuna_that_is_missing_or_too_new_is_refused_with_what_to_install(
    installed: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr("vitsweep.cli.hydra_detour.version", version)
    with pytest.raises(VitsweepError) as refused:
        with_optuna_defaults(["hydra/sweeper=optuna", "seed=1"])
    assert said in str(refused.value)


@pytest.mark.filterwarnings("ignore")  # as above
def test_what_optuna_refuses_is_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [])
    typed = ["hydra/sweeper=optuna", "seed=choice(1,2)", "hydra.sweeper.direction=up"]
    assert run(["-m", *typed], {}) == 2
    error = capsys.readouterr().err
    assert "`hydra/sweeper=optuna`: Please set either 'minimize' or 'maximize'" in error


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["plan", "seed=interval(0,1)"], "`plan` lists the cells of a grid"),
        (["-m", "hydra/sweeper/sampler=grid", "seed=1,2"], "a grid is what a sweep is without"),
        (["-m", "precision=glob(O*)"], "`hydra/sweeper=optuna` cannot read `glob`"),
    ],
)
def test_what_optuna_cannot_do_is_refused(
    typed: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*typed, "hydra/sweeper=optuna"], {}) == 2
    assert said in capsys.readouterr().err


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
        "+optimizer.note='a, b'",
        "sweep.name=mine",
    ]
    typed += ["++batch.shape=[1,2]", "hydra.launcher.parallel=3"]
    typed += ["resources.memory_gib_per_rank=null", "+optimizer.empty="]
    calls.multirun(*hide_from_hydra(typed))
    [request] = calls.requests
    cells = request.cells
    assert [cell.tree["precision"]["loss_scale"] for cell in cells] == [128, 128]
    assert cells[0].tree["optimizer"]["note"] == "a, b"
    assert cells[0].tree["optimizer"]["empty"] == ""
    assert cells[0].tree["batch"]["shape"] == [1, 2]
    assert len(cells) == 2
    assert cells[0].tree["resources"]["memory_gib_per_rank"] is None
    assert calls.settings[0].parallel == 3
    assert request.settings.name == "mine"


@pytest.mark.parametrize("overrides", [["hydra/sweeper=optuna", "seed=1"], ["seed=1,2", "~memory"]])
def test_nothing_is_hidden_that_another_must_read(overrides: list[str]) -> None:
    assert hide_from_hydra(overrides) == overrides


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
