"""Claims as people read them: families, one word for each, the best of many, equality; with simulations."""

import re

import numpy as np
import pytest
from pandas import DataFrame

from tests.builders import from_runs, run, table
from tests.noise import (
    coverage,
    drifting,
    heavy_tailed,
    normal,
    rotated,
    simulate,
)
from tests.said import opening
from vitsweep.report.answer import answers
from vitsweep.tables.cells import cells
from vitsweep.tables.diagnostics import diagnostics
from vitsweep.tables.formatting import ratio
from vitsweep.tables.load import families_of
from vitsweep.tables.render import footnotes
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import speedup_over
from vitsweep.tables.stats import LEVEL, adjusted

THREE, FIVE, TEN = (pytest.param(n, marks=pytest.mark.full) if n != 5 else n for n in (3, 5, 10))
"""Blocks of a design: five, as the shipped sweeps have; the others run in `make test-full`."""
NOISE = [1.0, 1.05, 0.96, 1.02, 0.98]


def blocks(cell: str, factor: float, noise: float = 0.01, **spec):
    shifted = np.roll(NOISE, len(cell))
    return [
        run(cell, f"b{i}", 1000 * factor * n ** (noise / 0.03), minute=i, **spec)
        for i, n in enumerate(shifted)
    ]


def sweep(**factors: float):
    base = [run("base", f"b{i}", 1000, minute=i) for i in range(5)]
    variants = [
        r for i, (c, f) in enumerate(factors.items()) for r in blocks(c, f, resolution_px=9 + i)
    ]
    return table(*base, *variants), dict.fromkeys(["base", *factors], "base")


def claim_of(found: DataFrame, cell: str):
    return found.set_index("cell_id").loc[cell]


def test_a_difference_that_is_not_shown_among_all_cells_is_not_claimed():
    some = {f"c{i}": 1.0 for i in range(12)}
    runs, baselines = sweep(likely=1.025, **some)
    row = claim_of(speedup_over(runs, baselines), "likely")
    assert row["speedup_low"] > 1
    assert row["claim"] == "no difference shown"
    assert row["claim_low"] < 1 < row["claim_high"]
    assert row["family_size"] == 13
    runs, baselines = sweep(likely=1.025)
    row = claim_of(speedup_over(runs, baselines), "likely")
    assert (row["claim"], row["family_size"]) == ("faster", 1)
    assert (row["claim_low"], row["claim_high"]) == pytest.approx(
        (row["speedup_low"], row["speedup_high"])
    )


def test_the_interval_of_a_claim_excludes_1_exactly_where_the_claim_holds():
    generator = np.random.default_rng(0)
    factors = {f"c{i}": float(np.exp(generator.normal(0, 0.03))) for i in range(15)}
    found = speedup_over(*sweep(**factors))
    compared = found[found["p_holm"].notna()]
    excludes = (compared["claim_low"] > 1) | (compared["claim_high"] < 1)
    assert (excludes == compared["claim"].isin(["faster", "slower"])).all()
    assert 0 < excludes.sum() < 15
    assert (excludes == (compared["claim"] != "no difference shown")).all()


def test_the_levels_of_holms_procedure():
    p = np.array([0.001, 0.02, 0.03, np.nan, 0.9])
    holm, level = adjusted(p)
    assert level.tolist() == pytest.approx(
        [LEVEL / 4, LEVEL / 3, LEVEL / 3, np.nan, LEVEL / 3], nan_ok=True
    )
    assert (holm < LEVEL).tolist() == (p < level).tolist()


def test_cells_of_other_commands_in_the_folder_do_not_weaken_a_claim():
    some = {f"c{i}": 1.0 for i in range(12)}
    runs, baselines = sweep(likely=1.025, **some)
    families = [frozenset(some), frozenset(["likely"])]
    rows = cells(runs, baselines, families=families)
    assert claim_of(rows, "likely")["claim"] == "faster"
    assert claim_of(rows, "c1")["family_size"] == 12


class Commands:
    """A sweep folder with commands alone."""

    def __init__(self, *commands: list[str]):
        self._commands = commands

    def commands(self):
        return [{"cells": cells} for cells in self._commands]


def test_a_retry_of_some_cells_makes_no_smaller_family():
    wide, other = ["a", "b", "c"], ["d", "e"]
    assert families_of(Commands(wide, other, ["b"])) == [frozenset(other), frozenset(wide)]
    assert families_of(Commands(["a"], wide)) == [frozenset("a"), frozenset(wide)]
    assert families_of(Commands()) == []


def table_concat(*tables: DataFrame) -> DataFrame:
    import pandas as pd

    return pd.concat(tables, ignore_index=True)


def test_what_is_shown_of_one_cell_alone_is_no_winner_and_the_table_says_why():
    runs, baselines = sweep(likely=1.025, **{f"c{i}": 1.0 for i in range(12)})
    [text] = answers(from_runs(runs, baselines))
    assert text.startswith(opening("none_shown", base="the baseline"))
    notes = "".join(footnotes(cells(runs, baselines))[1])
    assert say("own_interval", cells="13 cells") in notes
    assert re.search(r" 1\.0\dx \[0\.9\d*, 1\.\d+\] .*\b5 blocks .*\b13 cells", text)


EQUAL = {"base": 1.0} | {f"c{i}": 1.0 for i in range(16)}


@pytest.mark.parametrize("noise", [normal(), heavy_tailed(), drifting()], ids=["n", "h", "d"])
@pytest.mark.parametrize("num_blocks", [THREE, FIVE, TEN])
def test_the_shown_interval_covers_the_truth(noise, num_blocks):
    runs, baselines = simulate(
        {"base": 1.0, "a": 1.3, "b": 1.3, "c": 1.3}, noise, np.random.default_rng(num_blocks),
        num_blocks=num_blocks, sweeps=400, order=rotated,
    )  # fmt: skip
    found = speedup_over(runs, baselines)
    shown = found[found["p_value"].notna()]
    assert len(shown) == 1200
    # the intervals of a sweep share its baseline: 400 sweeps give a standard error of 0.8 %
    assert coverage(shown, 1.3) == pytest.approx(0.95, abs=0.02 + 0.008)


def test_diagnostics_are_silent_where_nothing_is() -> None:
    settings = {"base": 1.0} | {f"c{i}": 1.2 for i in range(5)}
    alarms = 0
    for seed in range(60):
        quiet, baselines = simulate(settings, normal(), np.random.default_rng(seed), num_blocks=14)
        alarms += int(diagnostics(quiet, baselines)["threatens"].sum())
    assert alarms <= 8  # one-sided at 2.5 %, over cells that share a baseline


def test_blocks_that_resemble_each_other_are_diagnosed():
    from tests.noise import autocorrelated

    estimates = []
    for seed in range(40):
        runs, baselines = simulate(
            {"base": 1.0, "a": 1.2, "b": 1.2, "c": 1.2}, autocorrelated(correlation=0.5),
            np.random.default_rng(seed), num_blocks=20,
        )  # fmt: skip
        row = (
            diagnostics(runs, baselines).set_index("diagnostic").loc["lag-1 correlation of blocks"]
        )
        estimates.append(row["estimate"])
    assert np.mean(estimates) == pytest.approx(0.5, abs=0.12)


def test_false_claims_over_16_equal_cells_are_at_most_5_percent():
    sweeps = 300
    runs, baselines = simulate(EQUAL, normal(), np.random.default_rng(21), sweeps=sweeps)
    found = speedup_over(runs, baselines)
    claimed = found[found["claim"].isin(["faster", "slower"])]["baseline_cell_id"].nunique()
    assert claimed / sweeps <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / sweeps)


def test_an_interval_that_is_shown_never_contradicts_its_claim() -> None:
    assert ratio(0.85, 0.72, 0.9971) == "0.850x [0.720, 0.997]"
    assert ratio(1.2, 1.00004, 1.4) == "1.20000x [1.00004, 1.40000]"
    assert ratio(1.0, 0.98, 1.0) == "1.00x [0.98, 1.00]"


@pytest.mark.parametrize("num_blocks", [5, 7])
def test_few_blocks_cannot_tell_whether_they_are_independent(num_blocks) -> None:
    speeds = [100 * np.exp(0.05 * i) for i in range(num_blocks)]  # as alike as can be
    runs = table(
        *(run("base", f"b{i}", 100, minute=i) for i in range(num_blocks)),
        *(run("a", f"b{i}", s, minute=i) for i, s in enumerate(speeds)),
    )
    row = diagnostics(runs, {"a": "base", "base": "base"}).set_index("diagnostic")
    assert not row.loc["lag-1 correlation of blocks", "threatens"]
    assert row.loc["lag-1 correlation of blocks", "sentence"] == ""
    more = table(
        *(run("base", f"b{i}", 100, minute=i) for i in range(14)),
        *(run("a", f"b{i}", 100 * np.exp(0.05 * i), minute=i) for i in range(14)),
    )
    row = diagnostics(more, {"a": "base", "base": "base"}).set_index("diagnostic")
    assert row.loc["lag-1 correlation of blocks", "threatens"]
    assert "are correlated" in row.loc["lag-1 correlation of blocks", "sentence"]
