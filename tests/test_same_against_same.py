"""Cells that are the same under different names: the sweep must not claim a difference."""

import pytest

from tests.command import Command

SWEEPS = 20
ALIKE = "optimizer.weight_decay=0.05,0.0501,0.0502,0.0503"
"""A number that changes no work; the first cell is the baseline."""


@pytest.mark.full
def test_identical_cells_differ_by_claim_in_at_most_one_sweep_of_twenty(vitsweep: Command) -> None:
    claiming = 0
    for sweep in range(SWEEPS):
        vitsweep(
            "-m", "measurement.blocks=5", f"sweep.name=same{sweep}", "measurement.measured_steps=10",
            ALIKE,
        )  # fmt: skip
        cells = vitsweep.cells(f"same{sweep}")
        claiming += cells["claim"].isin(["faster", "slower"]).any()
    assert claiming <= 1
