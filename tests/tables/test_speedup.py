import math
import re

import numpy as np
import pandas as pd
import pytest
from pandas import DataFrame, Series
from scipy import stats

from tests.builders import run, table
from tests.refusals import named
from tests.said import opening
from vitsweep.results.record import SCREENING, RunRecord, Status
from vitsweep.tables.cells import cells
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import about, speedup_over
from vitsweep.tables.stats import holm

BASELINES = {"base": "base", "fast": "base", "slow": "base", "same": "base"}


def blocks(cell: str, *speeds: float, **kwargs: object):
    return [run(cell, f"b{i}", speed, **kwargs) for i, speed in enumerate(speeds)]


def one(result: DataFrame, cell: str) -> Series:
    return result.set_index("cell_id").loc[cell]


def test_speedup_is_the_geometric_mean_of_the_ratios_within_blocks():
    # the second block ran on a machine half as fast: it cancels
    runs = table(*blocks("base", 100, 50, 100), *blocks("fast", 200, 100, 200))
    fast = one(speedup_over(runs, BASELINES), "fast")
    assert fast["speedup"] == pytest.approx(2.0)
    assert fast["speedup_low"] == pytest.approx(2.0)
    assert fast["num_blocks"] == 3
    assert fast["claim"] == "faster"


def test_images_of_a_step_are_equalised():
    big = [run("fast", f"b{i}", 150, images_per_step=560) for i in range(3)]
    runs = table(*blocks("base", 100, 100, 100), *big)
    assert one(speedup_over(runs, BASELINES), "fast")["speedup"] == pytest.approx(1.5)


def test_interval_is_students_t_over_log_ratios():
    ratios = [1.1, 1.3, 1.2, 1.25]
    runs = table(*blocks("base", *[100] * 4), *blocks("fast", *[100 * r for r in ratios]))
    logs = np.log(ratios)
    low, high = stats.t.interval(0.95, 3, logs.mean(), stats.sem(logs))
    fast = one(speedup_over(runs, BASELINES), "fast")
    assert (fast["speedup_low"], fast["speedup_high"]) == pytest.approx((np.exp(low), np.exp(high)))
    assert fast["p_value"] == pytest.approx(stats.ttest_1samp(logs, 0).pvalue)


def test_below_three_blocks_there_is_a_ratio_but_no_interval_and_no_claim():
    runs = table(*blocks("base", 100, 100), *blocks("fast", 300, 310))
    fast = one(speedup_over(runs, BASELINES), "fast")
    assert fast["speedup"] > 3
    assert math.isnan(fast["speedup_low"])
    assert math.isnan(fast["p_value"])
    assert fast["claim"] == "too few blocks"


def test_inside_the_noise_no_difference_is_claimed():
    runs = table(*blocks("base", 100, 100, 100), *blocks("same", 99, 101.5, 100))
    same = one(speedup_over(runs, BASELINES), "same")
    assert same["speedup_low"] < 1 < same["speedup_high"]
    assert same["claim"] == "no difference shown"


def test_slower_is_claimed_too():
    runs = table(*blocks("base", 100, 100, 100), *blocks("slow", 50, 51, 49))
    assert one(speedup_over(runs, BASELINES), "slow")["claim"] == "slower"


def test_claims_are_adjusted_for_the_number_of_comparisons():
    noise = blocks("fast", 104, 102, 101)
    alone = speedup_over(table(*blocks("base", 100, 100, 100), *noise), BASELINES)
    assert 0.05 < one(alone, "fast")["p_value"] < 0.2
    p = one(alone, "fast")["p_value"]
    others = [r for i in range(9) for r in blocks(f"same{i}", 99, 101.5, 100)]
    runs = table(*blocks("base", 100, 100, 100), *noise, *others)
    many = speedup_over(runs, BASELINES | {f"same{i}": "base" for i in range(9)})
    assert one(many, "fast")["p_holm"] == pytest.approx(min(1, 10 * p))


def test_holm_against_a_worked_example():
    # Holm 1979 by hand: 0.01 x 4, max(.., 0.02 x 3), max(.., 0.03 x 2), max(.., 0.4 x 1)
    adjusted = holm(Series([0.03, np.nan, 0.01, 0.4, 0.02]))
    assert adjusted.tolist() == pytest.approx([0.06, np.nan, 0.04, 0.4, 0.06], nan_ok=True)


def test_the_baseline_is_one_and_says_so():
    base = one(speedup_over(table(*blocks("base", 100, 90, 80)), BASELINES), "base")
    assert (base["speedup"], base["claim"], base["speedup_note"]) == (1.0, "baseline", "")
    assert math.isnan(base["p_holm"])


def test_a_failed_baseline_is_named():
    dead = [run("base", f"b{i}", status=Status.out_of_memory, reason="...") for i in range(3)]
    fast = one(speedup_over(table(*dead, *blocks("fast", 200, 200, 200)), BASELINES), "fast")
    assert math.isnan(fast["speedup"])
    assert fast["claim"] == ""
    assert fast["speedup_note"].startswith(opening("no_speedup"))
    assert "out of memory" in fast["speedup_note"]


def test_a_missing_baseline_is_named():
    fast = one(speedup_over(table(*blocks("fast", 200, 200, 200)), BASELINES), "fast")
    assert re.search("baseline.*never", fast["speedup_note"])


def test_cells_that_never_shared_a_block_are_not_compared():
    runs = table(run("base", "monday", 100), run("fast", "tuesday", 200))
    assert "no paired runs" in one(speedup_over(runs, BASELINES), "fast")["speedup_note"]


@pytest.mark.parametrize(
    ("nodes", "pairs"), [("n1,n2", 3), ("n1", 3), (None, 3), ("n3,n4", 2), ("n2,n3", 2)]
)
def test_a_block_that_went_on_elsewhere_after_a_requeue_is_no_pair(nodes: str | None, pairs: int):
    def on(place: str | None):
        return {"environment": {"nodes_used": place}}

    kept = [r for c in ("base", "fast") for r in blocks(c, 100, 110, **on("n1,n2"))]
    moved = [run("base", "b2", 100, **on("n1,n2")), run("fast", "b2", 900, **on(nodes))]
    fast = one(speedup_over(table(*kept, *moved), BASELINES), "fast")
    assert fast["num_blocks"] == pairs
    assert (fast["speedup"] == pytest.approx(1.0)) == (pairs == 2)
    assert ("other nodes than its baseline in 1 of 3" in fast["speedup_note"]) == (pairs == 2)


def test_blocks_of_two_sweeps_are_not_mixed_up():
    runs = table(run("base", "b0", 100, sweep="a"), run("fast", "b0", 200, sweep="b"))
    assert math.isnan(one(speedup_over(runs, BASELINES), "fast")["speedup"])


def test_no_baseline_gives_no_speedup_and_no_complaint():
    runs = table(*blocks("fast", 200, 200, 200))
    fast = one(speedup_over(runs, {"fast": None}), "fast")
    assert math.isnan(fast["speedup"])
    assert (fast["claim"], fast["speedup_note"]) == ("", "")


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, None])
def test_runs_without_a_finite_speed_are_left_out(bad):
    runs = table(*blocks("base", 100, 100, 100, 100), *blocks("fast", 200, 200, 200, bad))
    fast = one(speedup_over(runs, BASELINES), "fast")
    assert fast["speedup"] == pytest.approx(2.0)
    assert fast["num_blocks"] == 3


def test_a_wrong_cell_has_no_speedup():
    wrong = run("fast", "b3", status=Status.wrong, reason="loss differs", minute=9)
    runs = table(*blocks("base", 100, 100, 100, 100), *blocks("fast", 900, 900, 900), wrong)
    assert math.isnan(one(speedup_over(runs, BASELINES), "fast")["speedup"])


def simulated(
    generator: np.random.Generator, cells: int, num_blocks: int, truth: float
) -> DataFrame:
    """Many cells against one shared kind of noise: block effect, plus 3 % of their own."""
    names = np.repeat([f"c{i}" for i in range(cells)], num_blocks)
    block = np.tile([f"b{i}" for i in range(num_blocks)], cells)
    shared = np.exp(generator.normal(0, 0.2, cells * num_blocks))
    noise = [np.exp(generator.normal(0, 0.03, cells * num_blocks)) for _ in range(2)]
    common = {"sweep": "s", "status": "measured", "reason": "", "attempt": 1}
    base = DataFrame({"cell_id": names, "block": block, "images_per_second": shared * noise[0]})
    variant = base.assign(images_per_second=truth * shared * noise[1])
    rename = base.assign(cell_id="base-" + base["cell_id"])
    return DataFrame(
        {k: [*rename[k], *variant[k]] for k in ("cell_id", "block", "images_per_second")}
    ).assign(**common)


@pytest.mark.parametrize("num_blocks", [3, 5, 8])
def test_the_interval_covers_the_truth_95_percent_of_the_time(num_blocks):
    cells = 3000
    runs = simulated(np.random.default_rng(7), cells, num_blocks, truth=1.3)
    result = speedup_over(runs, {f"c{i}": f"base-c{i}" for i in range(cells)})
    shown = result[result["p_value"].notna()]
    assert len(shown) == cells
    covered = shown["speedup_low"].le(1.3) & shown["speedup_high"].ge(1.3)
    assert covered.mean() == pytest.approx(0.95, abs=0.02)


def test_identical_cells_are_called_different_in_at_most_5_percent_of_sweeps():
    sweeps, cells = 600, 6
    runs = simulated(np.random.default_rng(11), sweeps * cells, 5, truth=1.0)
    result = speedup_over(runs, {f"c{i}": f"base-c{i}" for i in range(sweeps * cells)})
    of_sweep = np.arange(sweeps * cells) // cells
    compared = result[result["p_value"].notna()].set_index(of_sweep)
    adjusted = compared.groupby(level=0)["p_value"].transform(holm)
    false_claims = adjusted.lt(0.05).groupby(level=0).any()
    assert false_claims.mean() <= 0.05 + 0.018  # two standard errors of 600 sweeps


def screening(cell: str, speed: float, block: str = "screening"):
    return run(cell, block, speed, environment={"purpose": SCREENING})


def test_a_screening_run_gives_a_ratio_without_interval_and_claim():
    runs = [*blocks("base", 100, 100, 100), *blocks("fast", 200, 210, 190)]
    found = speedup_over(
        table(*runs, screening("base", 50), screening("fast", 90), screening("slow", 2)), BASELINES
    )
    slow = one(found, "slow")
    assert slow["speedup"] == pytest.approx(0.04)
    assert math.isnan(slow["speedup_low"])
    assert (slow["claim"], slow["num_blocks"]) == ("screened", 0)
    assert slow["speedup_note"] == say("screened", about="about 0.040x as fast")
    pd.testing.assert_series_equal(
        one(found, "fast"), one(speedup_over(table(*runs), BASELINES), "fast")
    )


def test_a_ratio_of_a_hundred_and_more_is_written_without_an_exponent():
    assert about(104.2) == "about 104x as fast"
    assert about(99.4) == "about 99x as fast"
    assert about(1 / 12_345) == "about 0.000081x as fast"


def test_one_form_says_how_fast_a_faster_and_a_slower_cell_is():
    assert about(2.4) == "about 2.4x as fast"
    assert about(1 / 2.7) == "about 0.37x as fast"
    assert about(1.04) == about(1 / 1.04) == "about as fast"


def test_screening_runs_alone_show_ratios_of_all_cells():
    found = speedup_over(table(screening("base", 100), screening("fast", 150)), BASELINES)
    assert one(found, "fast")["speedup"] == pytest.approx(1.5)
    assert one(found, "fast")["speedup_note"] == say("screened", about="about 1.5x as fast")
    assert one(found, "base")["claim"] == "baseline"


def test_a_first_run_that_became_a_screening_run_has_the_ratio_of_its_block() -> None:
    runs = table(*blocks("base", 100, 100, 100), screening("slow", 2, "b0"))
    slow = one(speedup_over(runs, BASELINES), "slow")
    assert (slow["claim"], slow["speedup"]) == ("screened", pytest.approx(0.02))


def test_a_screening_run_enters_no_median_of_a_cell_with_full_blocks():
    runs = table(*blocks("base", 100, 100, 100), screening("base", 3), screening("slow", 1))
    found = cells(runs, {"base": "base", "slow": "base"})
    assert one(found, "base")["images_per_second"] == 100
    assert list(found["blocks"]) == [3, 0]
    assert one(found, "slow")["status"] == Status.measured
    assert one(found, "slow")["images_per_second"] == pytest.approx(100 / 3)


def test_a_run_without_a_throughput_above_0_is_no_block_and_is_named() -> None:
    speeds = {"base": (100, 100, 100, 100, 100), "fast": (130, 131, -5.0, float("nan"), 129)}
    runs = table(
        *(run(c, f"b{i}", s, minute=i) for c, of in speeds.items() for i, s in enumerate(of))
    )
    runs.loc[runs["run_id"] == "fast-b2-2", "images_per_second"] = -5.0
    row = cells(runs, {"base": "base", "fast": "base"}).set_index("cell_id").loc["fast"]
    assert (row["blocks"], row["num_pairs"]) == (3, 3)
    note = "it had no throughput in 2 of 5 blocks, which are left out"
    assert (row["claim"], row["speedup_note"]) == ("missing blocks", note)


def lost(status: Status, base: int = 0, fast: int = 2) -> DataFrame:
    """A cell that is 20 % faster in the blocks that are left of eight."""

    def of(cell: str, speed: float, gone: int) -> list[RunRecord]:
        return [
            run(cell, f"b{i}", speed + i % 3, minute=i)
            if i >= gone
            else run(cell, f"b{i}", status=status, reason="gone", minute=i)
            for i in range(8)
        ]  # fmt: skip

    return table(*of("base", 100, base), *of("fast", 120, fast))


@pytest.mark.parametrize(
    ("status", "words"),
    [(Status.timed_out, "timed out"), (Status.killed, "was killed"),
     (Status.out_of_memory, "memory"), (Status.wrong, "was wrong"),
     (Status.diverged, "diverged"), (Status.failed, "failed")],
)  # fmt: skip
def test_a_cell_that_lost_runs_to_their_own_end_is_not_called_faster(
    status: Status, words: str
) -> None:
    row = one(speedup_over(lost(status), BASELINES), "fast")
    assert row["speedup_low"] > 1
    assert (row["claim"], row["num_blocks"]) == ("missing blocks", 6)
    assert row["speedup_note"].startswith("it ")
    assert {"2", "8"} <= named(row["speedup_note"])
    assert words in row["speedup_note"]
    other = one(speedup_over(lost(status, base=2, fast=0), BASELINES), "fast")
    assert other["claim"] == "faster", (
        "a baseline that lost its slow runs looks too fast, not too slow"
    )
    assert other["speedup_note"] == row["speedup_note"].replace("it ", "its baseline ", 1)


def test_blocks_that_both_sides_lost_are_no_selection_and_those_of_one_side_are() -> None:
    both = lost(Status.failed, base=2)
    assert one(speedup_over(both, BASELINES), "fast")["claim"] == "faster"
    more = lost(Status.failed, base=1, fast=3)
    assert one(speedup_over(more, BASELINES), "fast")["claim"] == "missing blocks"


def test_a_run_that_was_repeated_in_its_block_is_no_selection() -> None:
    again = table(*(run("fast", f"b{i}", 120 + i % 3, minute=30 + i) for i in range(2)))
    both = pd.concat([lost(Status.timed_out), again])
    assert one(speedup_over(both, BASELINES), "fast")["claim"] == "faster"
    stopped = one(speedup_over(lost(Status.preempted), BASELINES), "fast")
    assert (stopped["claim"], stopped["speedup_note"]) == ("faster", "")


def test_an_emulated_format_has_a_ratio_but_no_interval_and_no_claim():
    emulated = {"precision": "fp8", "precision.emulate": True}
    runs = [
        run(cell, f"b{n}", rate + n, minute=n, **spec)
        for n in range(5)
        for cell, rate, spec in (
            ("base", 100, {}), ("fp8", 50, emulated), ("real", 150, {"precision": "O1"}),
        )
    ]  # fmt: skip
    found = cells(table(*runs), dict.fromkeys(("base", "fp8", "real"), "base")).set_index("cell_id")
    own = found.loc["fp8"]
    assert own["claim"] == "emulated"
    assert own["speedup"] == pytest.approx(0.5, rel=0.02)
    assert own[["speedup_low", "speedup_high", "p_holm", "claim_low", "claim_high"]].isna().all()
    assert found["claim"].drop("fp8").to_dict() == {"base": "baseline", "real": "faster"}
    assert found.loc["real", "family_size"] == 1
    over = speedup_over(table(*runs), dict.fromkeys(("base", "fp8", "real"), "fp8"))
    assert set(over["claim"]) == {"emulated", "baseline"}
