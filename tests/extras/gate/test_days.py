"""Two sweeps of the same cells: what changed in the ratios, whatever happened to the machine."""

import numpy as np
import pytest
from pandas import DataFrame
from scipy import stats

from tests.builders import run, table
from tests.noise import coverage, normal, simulate
from vitsweep.errors import VitsweepError
from vitsweep.extras.gate.sweep_diff import changes_in_words, sweep_diff
from vitsweep.results.record import Status

TRUTH = {"base": 1.0, "fast": 1.3, "slow": 0.8, "same": 1.0}


def day(truth=None, seed=0, **kwargs):
    return simulate(truth or TRUTH, normal(0.01), np.random.default_rng(seed), **kwargs)


def compared(a, b):
    return sweep_diff(a[0], b[0], a[1], b[1])


def one(found, cell):
    return found.set_index("cell_id").loc[cell]


def test_a_slower_machine_changes_no_speedup():
    found = compared(day(), day(seed=1, baseline_images_per_second=55.0))
    assert set(found["claim"]) == {"baseline", "no difference shown"}
    assert one(found, "base")["throughput_ratio"] < 0.8
    assert one(found, "fast")["change"] == pytest.approx(1.0, abs=0.03)


def test_a_technique_that_lost_its_effect_is_named_first():
    found = compared(day(), day(TRUTH | {"fast": 1.05}, seed=1))
    first = found.iloc[0]
    assert (first["cell_id"], first["claim"]) == ("fast", "slower")
    assert first["change"] == pytest.approx(1.05 / 1.3, rel=0.03)
    assert first["change_high"] < 1
    assert one(found, "slow")["claim"] == "no difference shown"
    words = "1 of 3 speedups changed, most fast: 0.8"
    assert changes_in_words(found).startswith(words)


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
    fast = one(sweep_diff(sides["a"], sides["b"], baselines, baselines), "fast")
    welch = stats.ttest_ind(logs["b"], logs["a"], equal_var=False)
    low, high = welch.confidence_interval(0.95)
    assert fast["p_value"] == pytest.approx(welch.pvalue)
    ends = (np.exp(low), np.exp(high))
    assert (fast["change_low"], fast["change_high"]) == pytest.approx(ends)
    assert (fast["num_blocks_a"], fast["num_blocks_b"]) == (4, 3)


def test_the_interval_covers_the_true_change_and_equal_days_are_rarely_called_different():
    sweeps = 600
    kwargs = {"sweeps": sweeps, "num_blocks": 5}
    truth = {"base": 1.0, "a": 1.2, "b": 0.9}
    found = compared(day(truth, **kwargs), day(truth, seed=1, **kwargs))
    variants = found[found["claim"] != "baseline"]
    assert coverage(variants, 1.0, "change") == pytest.approx(0.95, abs=0.02)
    by_sweep = variants.groupby(variants["cell_id"].str.split("/").str[0])["p_value"]
    adjusted = by_sweep.min() * 2  # Bonferroni of two cells
    assert (adjusted < 0.05).mean() <= 0.05 + 0.02


def test_cells_of_one_side_and_changed_statuses_are_said():
    a = table(*(run(c, f"b{i}") for i in range(3) for c in ("base", "old", "dies")))
    b = table(
        *(run(c, f"b{i}") for i in range(3) for c in ("base", "new")),
        run("dies", "b0", status=Status.out_of_memory, reason="..."),
    )
    both = {c: "base" for c in ("base", "old", "new", "dies")}
    found = sweep_diff(a, b, both, both)
    claims = dict(zip(found["cell_id"], found["claim"], strict=True))
    assert (claims["old"], claims["new"]) == ("only in A", "only in B")
    assert (claims["base"], claims["dies"]) == ("baseline", "status changed")
    assert one(found, "dies")["status_b"] == Status.out_of_memory


def test_other_baselines_are_not_compared():
    a, b = day(), day(seed=1)
    found = sweep_diff(a[0], b[0], a[1], b[1] | {"fast": "slow"})
    fast = one(found, "fast")
    assert fast["claim"] == "other baseline"
    assert np.isnan(fast["change"])


def test_too_few_blocks_give_a_change_without_a_claim():
    found = compared(day(num_blocks=2), day(seed=1, num_blocks=2))
    fast = one(found, "fast")
    assert fast["claim"] == "too few blocks"
    assert fast["change"] == pytest.approx(1.0, abs=0.05)
    assert np.isnan(fast["change_low"])


def test_devices_of_both_sides_are_shown():
    found = compared(day(), day(seed=1, environment={"device": "H200"}))
    assert one(found, "fast")[["device_a", "device_b"]].tolist() == ["AMD EPYC 7B13", "H200"]


@pytest.mark.parametrize("empty", [DataFrame(), table(run("a")).iloc[:0]])
def test_empty_sides(empty):
    full = day()
    assert compared((empty, {}), (empty, {})).empty
    assert set(compared(full, (empty, {}))["claim"]) == {"only in A"}
    assert set(compared((empty, {}), full)["claim"]) == {"only in B"}
    assert changes_in_words(compared(full, (empty, {}))).startswith("0 of 0 speedups")


def test_hostile_values():
    runs, baselines = day(num_blocks=6)
    speed = runs["images_per_second"].to_numpy(copy=True)
    speed[[1, 6, 11, 16]] = [np.nan, np.inf, -1.0, 0.0]
    found = compared((runs.assign(images_per_second=speed), baselines), day(seed=1))
    assert one(found, "fast")["change"] == pytest.approx(1.0, abs=0.05)
    failed = runs.assign(status="failed")
    assert set(compared((failed, baselines), (failed, baselines))["claim"]) == {""}
    with pytest.raises(VitsweepError, match="`cell_id` must name the cell"):
        compared((runs.assign(cell_id=None), {}), (runs, baselines))
    with pytest.raises(VitsweepError, match="Column `block`"):
        compared((runs.drop(columns="block"), baselines), (runs, baselines))
    text = runs.astype({"images_per_second": object})
    text.loc[0, "images_per_second"] = "fast"
    with pytest.raises(VitsweepError, match="must hold numbers"):
        compared((text, baselines), (runs, baselines))
