import math

import numpy as np
import pytest
from pandas import DataFrame
from scipy import stats

from tests.builders import run, table
from vitsweep.errors import VitsweepError
from vitsweep.tables.cells import cells
from vitsweep.tables.effects import longest_sequence, waterfall
from vitsweep.tables.names import with_changes
from vitsweep.tables.stats import contrast, samples

O1 = {"precision": "O1"}
FSDP = {"sharding": "fsdp"}
POOLED = {"classifier": "pooled", "num_tokens": 16}
SETTINGS = {
    "base": (100, {}),
    "o1": (150, O1),
    "fsdp": (90, FSDP),
    "pooled": (110, POOLED),
    "o1_fsdp": (160, O1 | FSDP),
    "all": (200, O1 | FSDP | POOLED),
}
BASELINES = dict.fromkeys(SETTINGS, "base")


@pytest.fixture
def runs():
    # each block at another pace: everything is paired
    return table(
        *[
            run(cell, f"b{i}", speed * pace, **spec)
            for cell, (speed, spec) in SETTINGS.items()
            for i, pace in enumerate([1.0, 0.7, 1.2])
        ]
    )


def test_techniques_measured_on_another_device_are_refused(runs):
    moved = runs.assign(device=runs["device"].mask(runs["cell_id"] == "all", "H200"))
    with pytest.raises(VitsweepError, match=r"EPYC 7B13, H200"):
        waterfall(moved, BASELINES)
    # two devices with a baseline each are two comparisons
    apart = moved.assign(device=moved["device"].mask(moved["cell_id"] == "fsdp", "H200"))
    own = BASELINES | {"all": "fsdp", "fsdp": "fsdp"}
    assert not waterfall(apart, own).empty


def test_changes_are_counted_once_though_other_columns_follow(runs):
    changes = with_changes(cells(runs, BASELINES)).set_index("cell_id")["changes"]
    assert changes["pooled"] == {"classifier=pooled"}
    assert changes["base"] == frozenset()


def test_alone_and_cumulative(runs):
    steps = waterfall(runs, BASELINES)
    alone = steps[steps["kind"] == "alone"].set_index("added")["speedup"]
    assert alone.to_dict() == pytest.approx(
        {"precision=O1": 1.5, "sharding=fsdp": 0.9, "classifier=pooled": 1.1}
    )
    chain = steps[steps["kind"] == "cumulative"]
    assert chain["cell_id"].tolist() == ["base", "o1", "o1_fsdp", "all"]
    assert chain["added"].tolist() == [
        "baseline", "precision=O1", "sharding=fsdp", "classifier=pooled"
    ]  # fmt: skip
    assert chain["speedup"].tolist() == pytest.approx([1.0, 1.5, 1.6, 2.0])


def test_a_gain_is_over_the_row_above_and_has_its_own_interval(runs):
    chain = waterfall(runs, BASELINES).query("kind == 'cumulative'").set_index("cell_id")
    assert chain.loc["all", "gain"] == pytest.approx(200 / 160)
    assert chain.loc["all", "gain_low"] == pytest.approx(200 / 160)
    assert chain.loc["all", "gain_claim"] == "faster"
    assert chain.loc["base", "gain"] == 1.0


def test_a_step_and_the_one_before_that_were_timed_separately_are_marked(runs):
    windows = runs["cell_id"].map({"o1_fsdp": 4.9, "all": 1.7, "o1": 1.6, "fsdp": 3.3}).fillna(1.7)
    steps = waterfall(runs.assign(window_seconds=windows), BASELINES).set_index("cell_id")["timed"]
    assert dict(steps[steps != ""]) == {
        "o1_fsdp": "timed for 4.9 s, the one before for 1.6 s",
        "all": "timed for 1.7 s, the one before for 4.9 s",
    }


def test_a_gain_that_longer_timing_may_explain_is_not_claimed(runs):
    nearly = runs["cell_id"].map({"o1_fsdp": 151.5 / 160, "all": 165 / 200}).fillna(1.0)
    runs = runs.assign(images_per_second=runs["images_per_second"] * nearly)
    for seconds, claim in ((1.7, "faster"), (4.9, "no difference shown")):
        windows = runs["cell_id"].map({"o1_fsdp": seconds}).fillna(1.7)
        steps = waterfall(runs.assign(window_seconds=windows), BASELINES).set_index("cell_id")
        gains = steps.loc[steps["kind"] == "cumulative", "gain_claim"]
        assert gains[["o1", "o1_fsdp", "all"]].tolist() == ["faster", claim, "faster"]


def test_of_two_orders_of_steps_the_planned_one_is_taken_whichever_ran_first(runs):
    for first in ("o1", "fsdp"):
        planned = dict.fromkeys(["base", first, *SETTINGS], "base")
        for data in (runs, runs.iloc[::-1]):
            chain = waterfall(data, planned).query("kind == 'cumulative'")
            assert chain["cell_id"].tolist() == ["base", first, "o1_fsdp", "all"]


def test_one_technique_alone_is_no_waterfall():
    runs = table(run("base"), run("o1", "b0", 150, **O1))
    assert waterfall(runs, BASELINES)["kind"].tolist() == ["alone"]


def test_the_longest_sequence_wins():
    a, ab, b, abc = map(frozenset, ("a", "ab", "b", "abc"))
    assert longest_sequence([b, abc, ab, a, frozenset()])[2:] == [ab, abc]
    assert len(longest_sequence([b, abc, ab, a, frozenset()])) == 4
    assert longest_sequence([]) == []


def in_two_groups():
    """As the launcher blocks a wide sweep: each half beside its own runs of the baseline."""
    groups = {"x": ["base", "o1", "fsdp"], "y": ["base", "o1_fsdp", "all"]}
    return table(
        *[
            run(cell, f"{group}{i}", SETTINGS[cell][0] * pace, **SETTINGS[cell][1])
            for group, members in groups.items()
            for cell in members
            for i, pace in enumerate([1.0, 0.7, 1.2])
        ]
    )


def test_steps_that_never_shared_a_block_are_compared_by_way_of_the_baseline():
    chain = waterfall(in_two_groups(), BASELINES).query("kind == 'cumulative'").set_index("cell_id")
    assert chain.loc["o1_fsdp", "gain"] == pytest.approx(160 / 150)
    assert chain.loc["o1_fsdp", "gain_low"] == pytest.approx(160 / 150)
    assert chain.loc["o1_fsdp", "gain_claim"] == "faster"
    assert chain.loc["all", "gain"] == pytest.approx(200 / 160)


def test_a_contrast_is_welchs_test():
    new, old = [0.31, 0.28, 0.33, 0.30], [0.20, 0.26, 0.17]
    ratios = DataFrame({"cell_id": ["n"] * 4 + ["o"] * 3, "log_ratio": [*new, *old]})
    found = contrast({"n": 1.0, "o": -1.0}, samples(ratios))
    welch = stats.ttest_ind(new, old, equal_var=False)
    low, high = np.exp(welch.confidence_interval(0.95))
    assert found["p_value"] == pytest.approx(welch.pvalue)
    assert (found["speedup_low"], found["speedup_high"]) == pytest.approx((low, high))
    over_base = contrast({"n": 1.0, "base": -1.0}, samples(ratios), "base")
    assert over_base["speedup"] == pytest.approx(np.exp(np.mean(new)))


def test_a_cell_without_a_block_shared_with_its_baseline_is_not_taken_for_the_baseline():
    # fsdp is 0.75x as fast as its baseline, but never ran in a block with it: the gain of o1_fsdp over it
    # is unknown, and not o1_fsdp's speedup over the baseline
    settings = {"base": (100, {}), "fsdp": (75, FSDP), "o1_fsdp": (150, O1 | FSDP)}
    blocks = {"base": "xyz", "fsdp": "uvw", "o1_fsdp": "xyz"}
    runs = table(*(run(c, b, s, **k) for c, (s, k) in settings.items() for b in blocks[c]))
    chain = waterfall(runs, dict.fromkeys(settings, "base")).query("kind == 'cumulative'")
    last = chain.set_index("cell_id").loc["o1_fsdp"]
    assert last["speedup"] == pytest.approx(1.5)
    assert math.isnan(last["gain"])
    assert last["gain_claim"] == ""
    ratios = DataFrame({"cell_id": ["n"] * 3, "log_ratio": [0.4, 0.41, 0.39]})
    assert math.isnan(contrast({"n": 1.0, "fsdp": -1.0}, samples(ratios), "base")["speedup"])
