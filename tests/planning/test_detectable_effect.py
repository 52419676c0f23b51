"""What `plan` says a sweep can show holds in simulation."""

import re
from math import inf, log

import numpy as np
import pytest
from scipy.stats import t

from tests.builders import run
from tests.cells import LAPTOP, TINY, composer
from vitsweep.composition.grid import expand
from vitsweep.planning.blocks import (
    ASSUMED_LOG_RATIO_SD,
    Noise,
    describe_detectable_effect,
    noise_of,
)
from vitsweep.planning.sweep_plan import plan_of
from vitsweep.results.record import SCREENING
from vitsweep.tables.stats import BLOCKS_FOR_CORRELATION, minimum_detectable_effect, spread_factor


def share_of_claims(effect: float, num_blocks: int, num_comparisons: int, sd: float) -> float:
    """Share of simulated sweeps in which a cell that is faster by `effect` gets the claim."""
    random = np.random.default_rng(3)
    sweeps = 2_000 if num_blocks >= BLOCKS_FOR_CORRELATION else 20_000
    ratios = random.normal(log(1 + effect), sd, size=(sweeps, num_blocks))
    error = ratios.std(axis=1, ddof=1) / np.sqrt(num_blocks)
    if num_blocks >= BLOCKS_FOR_CORRELATION:
        error *= [spread_factor(blocks) for blocks in ratios]
    p_values = 2 * t.sf(np.abs(ratios.mean(axis=1) / error), num_blocks - 1)
    return float((p_values < 0.05 / num_comparisons).mean())


def test_the_effect_is_shown_in_four_of_five_sweeps() -> None:
    for num_blocks, off in [(3, 0.01), (5, 0.01), (11, 0.01), (20, 0.03)]:
        for num_comparisons in [1, 4, 16]:
            for sd in [0.01, 0.05]:
                effect = minimum_detectable_effect(num_blocks, num_comparisons, sd)
                assert share_of_claims(effect, num_blocks, num_comparisons, sd) == pytest.approx(
                    0.8, abs=off
                )


def test_screening_runs_are_no_noise() -> None:
    speeds = {"base": 100.0, "a": 120.0}
    runs = [run(c, f"b{n}", v + n) for n in range(6) for c, v in speeds.items()]
    screened = [
        run(c, "b6", v, environment={"purpose": SCREENING})
        for c, v in (("base", 10.0), ("a", 99.0))
    ]
    pairs = {"a": "base", "base": "base"}
    assert noise_of([*runs, *screened], pairs) == noise_of(runs, pairs)


def test_known_figures() -> None:
    assert minimum_detectable_effect(5, 16, 0.03) == pytest.approx(0.113, abs=0.001)
    assert minimum_detectable_effect(11, 16, 0.03) == pytest.approx(0.045, abs=0.001)
    assert minimum_detectable_effect(2, 1, 0.03) == inf


def test_the_noise_is_pooled_within_cells() -> None:
    random = np.random.default_rng(5)
    runs = []
    for number in range(200):
        level = random.normal(0, 0.3)  # of the block; cancels in ratios
        for cell, effect in (("base", 0.0), ("a", 0.4), ("b", -0.2)):
            speed = 100 * np.exp(level + effect + random.normal(0, 0.02))
            runs.append(run(cell, f"b{number}", speed))
    noise = noise_of(runs, {"a": "base", "b": "base", "base": "base"})
    assert noise.num_ratios == 400
    assert noise.log_ratio_sd == pytest.approx(0.02 * 2**0.5, rel=0.1)


def test_without_records_the_noise_is_assumed_and_reported() -> None:
    assert noise_of([], {}) == Noise(ASSUMED_LOG_RATIO_SD, 0)
    assert noise_of([run("a"), run("base")], {"a": "base"}).num_ratios == 0
    plan = plan_of(expand([*TINY, "sharding=ddp,fsdp,zero1"], composer()), LAPTOP, composer())
    said = describe_detectable_effect(plan, Noise())
    assert re.match(r"5 blocks [^%]* 11 % \(80 % power, 2 cells", said)
    assert re.search(r"\b11 blocks [^%]* 5.5 %", said)
    assert " 5 % (assumed" in said


def test_nothing_is_reported_where_nothing_is_compared() -> None:
    def said(*overrides: str) -> str:
        cells = expand([*TINY, *overrides], composer())
        return describe_detectable_effect(plan_of(cells, LAPTOP, composer()), Noise())

    assert said("sharding=fsdp,ddp", "sweep.baseline=null") == ""
    assert "%" not in said("sharding=fsdp", "measurement=smoke")
    assert "measurement.blocks=" in said("sharding=fsdp", "measurement=smoke")
