"""A user's technique is edited between commands: old numbers are neither shown nor pooled."""

from pathlib import Path

import pytest

from tests.command import Command

TECHNIQUE = """
from dataclasses import dataclass
from vitsweep.spec.technique import Memory

@dataclass(frozen=True, kw_only=True)
class Mine(Memory):
    def apply(self, model):
        from lab.helper import changed
        return changed(model)
"""
RIGHT = "def changed(model):\n    return model\n"
WRONG = """
def changed(model):
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model
"""
CELL = ("memory._target_=lab.technique.Mine",)


@pytest.fixture
def helper(tmp_path: Path) -> Path:
    """The module that the technique imports inside its function, not written yet."""
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "technique.py").write_text(TECHNIQUE)
    return folder / "helper.py"


def test_after_an_edit_a_cell_is_measured_again_and_the_old_run_not_pooled(
    vitsweep: Command, helper: Path
) -> None:
    one = (*CELL, "sweep.baseline=null")
    helper.write_text(RIGHT)
    assert vitsweep(*one).returncode == 0
    helper.write_text(f"{RIGHT}# tidied\n")
    planned = " ".join(vitsweep("plan", *one).stdout.split())
    assert "(lab.helper)" in planned

    assert vitsweep(*one).returncode == 0
    [cell], runs = vitsweep.cells().to_dict("records"), vitsweep.runs()
    assert (cell["status"], cell["blocks"]) == ("measured", 1)
    newest = runs.sort_values("started_at")["images_per_second"].iloc[-1]
    assert cell["images_per_second"] == newest, "of the new code alone"
    assert len(runs) == 2, "the old run is kept"


@pytest.mark.full
def test_a_technique_that_is_wrong_or_tidied_is_found_out_by_the_next_command(
    vitsweep: Command, helper: Path
) -> None:
    command, cell = vitsweep, (*CELL, "measurement.blocks=2")
    proving = (*cell, "measurement.prove=twin")
    helper.write_text(WRONG)
    assert command(*cell).returncode == 0, "nothing is proved under measurement=smoke"
    proved = command(*proving)
    assert "measurement.prove=twin" in proved.stdout, "it says why it measures again"
    assert proved.returncode == 3
    assert set(command.cells()["status"]) == {"wrong", "measured"}

    helper.write_text(RIGHT)
    assert command(*proving).returncode == 0
    cells, runs = command.cells(), command.runs()
    mine = cells[cells["baseline_cell_id"] != cells["cell_id"]]
    assert list(zip(mine["status"], mine["blocks"], mine["num_pairs"], strict=True)) == [
        ("measured", 2, 2)
    ], "of the new code alone"
    assert (runs["cell_id"] == mine["cell_id"].iloc[0]).sum() == 5, "the others are kept"

    assert "runnable" not in command("plan", *proving).stdout, "the baseline is measured too"
    helper.write_text(f"{RIGHT}# tidied\n")
    assert "runnable" in command("plan", *proving).stdout
    accepting = command("plan", *proving, "sweep.accept_code=any").stdout
    assert "runnable" not in accepting
    assert "(`sweep.accept_code=any`)" in accepting
