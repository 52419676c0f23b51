"""Cells that are the same under different names: nothing may claim a difference."""

import re

import pytest

from tests.command import QUICK, Command

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

TIMES, CLAIMS = 12, 2
"""Chance alone makes a claim in 5 %: three or more of twelve in one test of fifty."""

ALIKE = ("0.05", "0.0501", "0.0502", "0.0503")
"""Values of a number that changes no work, the weight decay."""


def test_identical_cells_are_distinguished_in_at_most_two_sweeps_of_twelve(
    vitsweep: Command,
) -> None:
    claiming = 0
    for n in range(TIMES):
        done = vitsweep(
            "-m", "measurement.blocks=5", f"sweep.name=same{n}", "measurement.measured_steps=10",
            f"optimizer.weight_decay={','.join(ALIKE)}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        claiming += vitsweep.cells(f"same{n}")["claim"].isin(["faster", "slower"]).any()
    assert claiming <= CLAIMS


CLAIM = re.compile(r"over \d+ blocks: (faster|slower|no difference shown)\.")


def test_identical_settings_are_distinguished_in_at_most_two_comparisons_of_twelve(
    vitsweep: Command,
) -> None:
    pair = [f"optimizer.weight_decay={value}" for value in ALIKE[:2]]
    said = []
    for _ in range(TIMES):
        done = vitsweep(
            "compare", *pair, *QUICK, "measurement.measured_steps=10", "--width=0.2", "--minutes=4",
            "sweep.remeasure=true", quick=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said += CLAIM.findall(done.stdout)
    print(said)
    assert len(said) == TIMES
    assert sum(claim != "no difference shown" for claim in said) <= CLAIMS
