"""A cell is named by the techniques that an experiment of one's own chooses."""

from pathlib import Path

from vitsweep.composition import hydra
from vitsweep.composition.composer import Composer
from vitsweep.composition.grid import baseline_of
from vitsweep.planning.sweep_plan import cell_labels, make_sweep_plan
from vitsweep.spec.menu import conf_dir
from vitsweep.spec.resources import Machine

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
