"""A cell of the menu on GPUs differs from its baseline by its technique alone, and can run."""

from dataclasses import fields

import pytest

from tests.cells import GPU_NODE, composer
from vitsweep.composition.grid import baseline_of, expand
from vitsweep.composition.sweep_settings import sweep_settings
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import CellSpec

OF_ALL = {"model", "data", "batch.images_per_step", "resources.ranks_per_node"}


@pytest.mark.full
def test_both_sides_have_the_fast_choices_and_only_the_technique_between_them() -> None:
    cells = expand(["+sweep=menu_2026_cluster"], composer())
    assert len({cell.key for cell in cells}) == len(cells)
    baselines: dict[str, CellSpec] = {}
    for cell in cells:
        composed = baseline_of(cell, composer())
        assert composed is not None
        baseline, planned = plan_cell(composed, GPU_NODE), plan_cell(cell, GPU_NODE)
        assert not baseline.reasons
        assert not [r for r in planned.reasons if "not installed" not in r]
        baselines[baseline.cell_id] = baseline.spec
        groups = {f.name for f in fields(CellSpec)}
        differing = {g for g in groups if getattr(planned.spec, g) != getattr(baseline.spec, g)} - {
            "mesh"
        }  # follows from sharding
        shared = {
            "precision": "bf16_masters",
            "compilation": "compile_blocks",
            "optimizer": "adamw_fused",
        }
        typed = {
            text.partition("=")[0].partition(".")[0]
            for text in cell.overrides
            if text.partition("=")[0] not in OF_ALL
            and not text.startswith("sweep.")
            and text not in {f"{group}={choice}" for group, choice in shared.items()}
        }
        assert differing == typed, cell.overrides
        assert {g: getattr(baseline.spec, g).name for g in shared} == shared
    assert sorted(b.resources.world_size for b in baselines.values()) == [1, 2]
    assert sweep_settings(cells[0].tree).name == "menu_2026_cluster"


def test_what_is_about_several_gpus_runs_on_several() -> None:
    for cell in expand(["+sweep=menu_2026_cluster"], composer()):
        if cell.choices["sharding"] == "fsdp" or cell.tree["sharding"].get("gradient_dtype"):
            assert cell.tree["resources"]["ranks_per_node"] >= 2
