"""A user's technique is edited between commands: old numbers are neither shown nor pooled."""

from pathlib import Path

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
CELL = ("memory._target_=lab.technique.Mine", "measurement.blocks=2")


def test_a_technique_that_is_wrong_or_edited_is_found_out_by_the_next_command(
    tmp_path: Path,
) -> None:
    command, proving = Command(tmp_path), (*CELL, "measurement.prove=twin")
    helper = tmp_path / "lab" / "helper.py"
    helper.parent.mkdir()
    (helper.parent / "technique.py").write_text(TECHNIQUE)

    helper.write_text(WRONG)
    assert command(*CELL).returncode == 0, "nothing is proved under measurement=smoke"
    proved = command(*proving)
    assert "measurement.prove=twin" in proved.stdout, "it says why it measures again"
    assert proved.returncode == 3
    assert set(command.cells()["status"]) == {"wrong", "measured"}

    helper.write_text(RIGHT)
    planned = " ".join(command("plan", *proving).stdout.split())
    assert "code that computes them has changed (lab.helper)" in planned
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
    assert "1 cell is used as measured by other code" in accepting
