"""Configuration folders of installed packages are found, and vitsweep's applications alone see them."""

from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hydra._internal.utils import create_config_search_path

from hydra_plugins.vitsweep_launchers import search_path
from tests.command import ROOT
from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import baseline_of
from vitsweep.planning.sweep_plan import cell_labels, make_sweep_plan
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resources import Machine

EXAMPLE = ROOT / "examples" / "own_model"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("own_model", "own_model", search_path.GROUP)
    monkeypatch.syspath_prepend(EXAMPLE)
    known = metadata.entry_points
    of_group = {search_path.GROUP: [entry]}
    monkeypatch.setattr(
        metadata, "entry_points", lambda **asked: of_group.get(asked.get("group")) or known(**asked)
    )


@pytest.mark.usefixtures("installed")
def test_choices_of_an_installed_package_compose() -> None:
    composer = Composer(hydra.open_loader(conf_dir()))
    assert "own" in composer.options("model")
    assert composer.compose(["model=own"]).tree["model"]["blocks"] == "encoder.layers"


@pytest.mark.usefixtures("installed")
def test_another_application_of_hydra_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    found = create_config_search_path(str(tmp_path / "conf")).get_path()
    assert not [entry for entry in found if entry.provider == "own_model"]


EX1 = """# @package _global_
defaults:
  - override /precision: O1
  - override /sharding: fsdp
"""


def test_a_cell_is_named_by_the_techniques_of_an_experiment_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "ex1.yaml").write_text(EX1)
    composer = Composer(hydra.open_loader(conf_dir(), tmp_path))
    cells = [composer.compose(["+experiment=ex1"])]
    plan = make_sweep_plan(cells, Machine.here(), lambda cell: baseline_of(cell, composer))
    assert [*cell_labels(plan).values()] == ["O1 + fsdp", "baseline"]
    alone = make_sweep_plan(cells, Machine.here(), lambda cell: None)
    assert [*cell_labels(alone).values()] == ["O1 · fsdp"]
