"""Two sweeps of the same cells: what changed in the ratios, whatever happened to the machine."""

import numpy as np
import pytest
from scipy import stats

from tests.builders import from_runs, run, table
from tests.noise import normal, simulate
from vitsweep.errors import VitsweepError
from vitsweep.extras.gate.diff import changed, diff
from vitsweep.results.record import Status

TRUTH = {"base": 1.0, "fast": 1.3, "slow": 0.8, "same": 1.0}


def day(truth=None, seed=0, **kwargs):
    return simulate(truth or TRUTH, normal(0.01), np.random.default_rng(seed), **kwargs)


def compared(a, b):
    return changed(*(from_runs(*side) for side in (a, b)))


def one(found, cell):
    return found.set_index("cell_id").loc[cell]


def test_a_slower_machine_changes_no_speedup():
    found = compared(day(), day(seed=1, baseline_images_per_second=55.0))
    assert set(found["claim"]) == {"no difference shown"}
    assert one(found, "fast")["change"] == pytest.approx(1.0, abs=0.03)


def test_a_technique_that_lost_its_effect_is_named_first():
    found = compared(day(), day(TRUTH | {"fast": 1.05}, seed=1))
    first = found.iloc[0]
    assert (first["cell_id"], first["claim"]) == ("fast", "worse")
    assert first["change"] == pytest.approx(1.05 / 1.3, rel=0.03)
    assert first["change_high"] < 1
    assert one(found, "slow")["claim"] == "no difference shown"


def test_the_interval_is_welchs_over_log_ratios():
    logs = {"a": [0.10, 0.14, 0.11, 0.09], "b": [0.20, 0.24, 0.16]}
    sides = {
        side: table(
            *(r for i, v in enumerate(values) for r in (
                run("base", f"{side}{i}", 100), run("fast", f"{side}{i}", 100 * np.exp(v))
            ))
        )
        for side, values in logs.items()
    }  # fmt: skip
    baselines = {"base": "base", "fast": "base"}
    fast = one(compared(*((side, baselines) for side in sides.values())), "fast")
    welch = stats.ttest_ind(logs["b"], logs["a"], equal_var=False)
    low, high = welch.confidence_interval(0.95)
    ends = (np.exp(low), np.exp(high))
    assert (fast["change_low"], fast["change_high"]) == pytest.approx(ends)
    assert (fast["count_kept"], fast["count_now"]) == (4, 3)


def test_equal_days_are_rarely_called_different():
    truth, different = {"base": 1.0, "a": 1.2, "b": 0.9, "c": 1.1}, 0
    for seed in range(40):
        (now, baselines), (kept, _) = (day(truth, 2 * seed + n, num_blocks=5) for n in (0, 1))
        found = diff(now, kept, baselines, mixed_hardware=True)
        different += bool(((found["ratio_low"] > 1) | (found["ratio_high"] < 1)).any())
    assert different <= 6, "two of 40 are expected"


def test_where_one_cell_became_worse_the_others_are_tested_at_a_larger_level():
    """Holm's method: the interval of the second of two cells is as wide as if it were alone."""
    truth = {"base": 1.0, "a": 1.2, "b": 0.9}
    (now, baselines), (kept, _) = day(truth | {"a": 0.8}), day(truth, 1)
    two = diff(now, kept, baselines, mixed_hardware=True).set_index("cell_id")
    alone = diff(*(s[s["cell_id"] != "a"] for s in (now, kept)), baselines, mixed_hardware=True)
    assert two.loc["b", "ratio_high"] == pytest.approx(
        alone.set_index("cell_id").loc["b", "ratio_high"]
    )
    assert two.loc["a", "verdict"] == "worse beyond tolerance"


def test_cells_of_one_side_and_changed_statuses_are_reported():
    a = table(*(run(c, f"b{i}") for i in range(3) for c in ("base", "old", "dies")))
    b = table(
        *(run(c, f"b{i}") for i in range(3) for c in ("base", "new")),
        run("dies", "b0", status=Status.out_of_memory, reason="..."),
    )
    both = {c: "base" for c in ("base", "old", "new", "dies")}
    found = compared((a, both), (b, both))
    claims = dict(zip(found["cell_id"], found["claim"], strict=True))
    assert (claims["old"], claims["new"]) == ("not run now", "new")
    assert claims["dies"] == "no longer measured"
    assert one(found, "dies")["status_now"] == Status.out_of_memory


def test_too_few_blocks_give_a_change_without_a_claim():
    found = compared(day(num_blocks=2), day(seed=1, num_blocks=2))
    fast = one(found, "fast")
    assert fast["claim"] == "too few runs"
    assert fast["change"] == pytest.approx(1.0, abs=0.05)
    assert np.isnan(fast["change_low"])


def test_a_side_without_runs_is_refused():
    with pytest.raises(VitsweepError, match="`a` and `b` must both hold runs"):
        compared(day(), (table(run("a")).iloc[:0], {}))


def test_hostile_values():
    runs, baselines = day(num_blocks=6)
    speed = runs["images_per_second"].to_numpy(copy=True)
    speed[[1, 6, 11, 16]] = [np.nan, np.inf, -1.0, 0.0]
    found = compared((runs.assign(images_per_second=speed), baselines), day(seed=1))
    assert one(found, "fast")["change"] == pytest.approx(1.0, abs=0.05)
    failed = runs.assign(status="failed")
    claims = compared((failed, baselines), (failed, baselines))["claim"]
    assert set(claims) == {"not measured before"}
    for broken, said in (
        (runs.assign(cell_id=None), "`cell_id` must name the cell"),
        (runs.drop(columns="block"), "Column `block`"),
        (
            runs.astype({"images_per_second": object}).assign(images_per_second="fast"),
            "must hold numbers",
        ),
    ):
        with pytest.raises(VitsweepError, match=said):
            diff(broken, runs, baselines)
