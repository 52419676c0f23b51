"""After how many steps compiling pays: against the eager cell with the same settings."""

import pytest
from pandas import DataFrame

from tests.builders import run, table
from vitsweep.tables.cells import cells
from vitsweep.tables.cost import COLUMN


def sample() -> DataFrame:
    runs = table(
        run("eager", images_per_second=100.0),
        run("blocks", images_per_second=160.0, compilation="compile_blocks",
            metrics={"compile_seconds": 24.0}),
        run("model", images_per_second=80.0, compilation="compile_model",
            metrics={"compile_seconds": 50.0}),
        run("alone", images_per_second=160.0, compilation="compile_blocks", precision="O2",
            metrics={"compile_seconds": 24.0}),
    )  # fmt: skip
    return cells(runs, dict.fromkeys(runs["cell_id"]))


def test_seconds_of_compiling_are_repaid_by_what_a_step_is_faster() -> None:
    steps = sample().set_index("cell_id")[COLUMN]
    # 64 images: 640 ms eager, 400 ms compiled
    assert steps["blocks"] == pytest.approx(100)
    assert steps[["eager", "model", "alone"]].isna().all()
