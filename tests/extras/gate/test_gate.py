import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tests.builders import run, table
from tests.noise import normal, simulate
from tests.said import opening
from vitsweep.errors import VitsweepError
from vitsweep.extras.gate.diff import ABSENT, TOO_FEW, UNDECIDED, WORSE
from vitsweep.extras.gate.gate import gate
from vitsweep.results.record import Status
from vitsweep.tables.notes import START, two_starts
from vitsweep.tables.sentences import say


def side(**speeds):
    return table(
        *[
            run(cell, f"b{i}", speed, precision=cell)
            for cell, values in speeds.items()
            for i, speed in enumerate(values)
        ]
    )


def one(result, cell):
    return result.rows.set_index("cell_id").loc[cell]


KEPT = side(fp32=[100, 101, 99, 100], O1=[150, 151, 149, 150])


def test_the_same_numbers_pass():
    result = gate(KEPT, KEPT)
    assert result.passed
    assert one(result, "O1")["verdict"] == "no difference shown"
    for metric in ("speedup", "step ms"):  # a loss within so wide a tolerance is no hidden one
        wide = gate(KEPT, KEPT, tolerance=0.6, metrics=[metric])
        assert wide.passed
        assert "undecided" not in " ".join(wide.sentences)
    noisy = gate(side(O1=[50, 180, 90, 140]), KEPT, tolerance=0.6)
    assert one(noisy, "O1")["verdict"] == UNDECIDED


def test_a_regression_beyond_noise_and_tolerance_fails_and_says_why():
    result = gate(side(fp32=[100, 101, 99, 100], O1=[130, 131, 129, 130]), KEPT)
    assert not result.passed
    assert one(result, "O1")["verdict"] == "worse beyond tolerance"
    assert result.sentences[0].startswith("O1 (O1): throughput at 0.87x [0.8")
    assert "accepted from 0.95" in result.sentences[0]


def test_a_regression_inside_the_tolerance_passes():
    result = gate(side(O1=[146, 147, 145, 146]), KEPT, lenient=True)
    assert result.passed
    assert one(result, "O1")["verdict"] == "worse within tolerance"


def test_noise_that_hides_a_loss_of_half_leaves_the_gate_undecided():
    noisy = side(O1=[90, 180, 60, 140], fp32=[100, 101, 99, 100])
    result = gate(noisy, KEPT)
    assert (result.passed, result.undecided) == (False, True)
    assert one(result, "O1")["verdict"] == UNDECIDED
    assert result.sentences[0].startswith("O1 (O1): throughput at ")
    assert re.search(r"undecided, .* [5-9]\d % ", result.sentences[0])
    assert result.verdict.endswith(": 1 undecided.")
    assert result.blocks_to_decide == 40
    lenient = gate(noisy, KEPT, lenient=True)
    assert lenient.passed
    assert lenient.sentences[0].startswith("Warning: O1 (O1): throughput")


def test_a_noisy_baseline_is_a_warning_only_where_ratios_over_it_are_compared():
    own = {"fp32": [90, 180, 60, 140]}
    pairs = {"O1": [1.5 * v for v in own["fp32"]]}
    bases = {"fp32": "fp32", "O1": "fp32"}
    both = gate(side(**own, **pairs), side(**own, **pairs), baselines=bases)
    assert both.passed
    assert both.sentences[0].startswith("Warning: fp32 (fp32): throughput at ")
    assert gate(side(**own), side(**own), baselines=bases).undecided


def test_the_interval_is_welchs():
    now = side(fp32=[90, 92, 91])
    logs = [np.log([90, 92, 91]), np.log([100, 101, 99, 100])]
    interval = stats.ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    row = one(gate(now, KEPT), "fp32")
    assert (row["ratio_low"], row["ratio_high"]) == pytest.approx(tuple(np.exp(interval)))


def test_many_cells_share_the_level():
    many = {f"p{i}": [100, 101, 99, 102] for i in range(20)}
    alone = gate(side(p0=[98, 99, 97, 98]), side(p0=many["p0"]))
    wide = gate(side(**many | {"p0": [98, 99, 97, 98]}), side(**many))
    assert one(wide, "p0")["ratio_high"] > one(alone, "p0")["ratio_high"]


def test_a_cell_that_ran_out_of_memory_since_fails():
    now = table(
        run("O1", status=Status.out_of_memory, reason="rank 0 has no room.", precision="O1")
    )
    result = gate(now, KEPT)
    assert not result.passed
    assert result.sentences[0].startswith(
        opening("gated_without", name="O1 (O1)", verdict="no longer measured")
    )
    assert "(out of memory: rank 0 has no room)" in result.sentences[0]
    lenient = gate(now, KEPT, lenient=True)
    assert lenient.passed
    assert lenient.sentences[0] == f"Warning: {result.sentences[0]}"


def test_a_cell_that_is_gone_and_too_few_runs_fail_unless_lenient():
    now = side(O1=[75, 75], bf16=[10, 10, 10])
    result = gate(now, KEPT)
    assert not result.passed
    verdicts = result.rows.set_index("cell_id")["verdict"].to_dict()
    assert verdicts == {"O1": "too few runs", "bf16": "new", "fp32": "not run now"}
    assert {f"1 {TOO_FEW}", f"1 {ABSENT}."} == {*result.verdict.split(": ")[1].split(", ")}
    lenient = gate(now, KEPT, lenient=True)
    assert lenient.passed
    assert lenient.sentences[0].startswith(f"Warning: O1 (O1): {TOO_FEW} (throughput: 4 ")
    assert f"1 {TOO_FEW}" in lenient.verdict


def test_a_block_that_is_no_longer_measured_fails_unless_a_later_try_was():
    now = table(
        *(run("O1", f"b{i}", 150 + i, precision="O1") for i in range(4)),
        *(run("fp32", f"b{i}", 100 + i, precision="fp32") for i in range(3)),
        run("fp32", "b3", status=Status.out_of_memory, reason="no room", precision="fp32"),
    )
    result = gate(now, KEPT)
    assert one(result, "fp32")["verdict"] == "missing blocks"
    assert not result.passed
    assert gate(now, KEPT, lenient=True).passed
    again = table(run("fp32", "b3", 100, precision="fp32", minute=9))
    assert gate(pd.concat([now, again]), KEPT).passed


def accuracy(*values):
    return table(
        *(
            run("O1", f"b{i}", 100 + i, metrics={"accuracy_top1": v}, precision="O1")
            for i, v in enumerate(values)
        )
    )


def test_an_accuracy_that_fell_fails_whatever_metric_is_asked_for():
    kept = accuracy(0.960, 0.961, 0.959)
    assert gate(accuracy(0.959, 0.960, 0.960), kept).passed
    result = gate(accuracy(0.93, 0.931, 0.929), kept)
    assert not result.passed
    values = {"name": "O1 (O1)", "metric": "`accuracy_top1`", "size": "0.97x [0.97, 0.97]"}
    limit = {"accepted": "from", "limit": 0.99, "verdict": "accuracy fell", "notes": ""}
    assert result.sentences[0] == say("gated", **values, **limit)
    assert gate(accuracy(0.93, 0.931, 0.929), kept, lenient=True).passed
    # one run in a block says it as well: a seed repeats
    assert gate(accuracy(0.9, None, None), kept).rows["verdict"].tolist()[-1] == "accuracy fell"


def on(device, *speeds, cell="O1"):
    return table(
        *[
            run(cell, f"b{i}", speed, precision=cell, environment={"device": device})
            for i, speed in enumerate(speeds)
        ]
    )


def test_another_device_is_refused_unless_asked_for():
    now = on("H200", 20, 20, 21)
    with pytest.raises(VitsweepError, match=r"O1 ran on H200, .* on AMD EPYC.*--mixed-hardware"):
        gate(now, KEPT)
    assert not gate(now, KEPT, mixed_hardware=True).passed
    # a cell on one side only is no comparison
    other = pd.concat([side(fp32=[100] * 3), on("H200", 20, 20, cell="bf16")])
    assert gate(other, KEPT, lenient=True).passed


def test_a_baseline_that_failed_or_is_empty_is_refused():
    failed = table(run("O1", status=Status.failed, reason="KeyError", precision="O1"))
    for kept in (failed, failed.iloc[:0]):
        with pytest.raises(VitsweepError, match="baseline"):
            gate(KEPT, kept)
    partly = pd.concat([side(fp32=[100, 101, 99]), failed])
    result = gate(KEPT, partly)
    assert result.passed
    assert one(result, "O1")["verdict"] == "not measured before"


def test_numbers_that_are_not_finite_do_not_count():
    now = side(O1=[130, 131, 129, 130], fp32=[100, 101, 99, 100])
    odd = side(O1=[float("nan"), float("inf"), 0.0])
    result = gate(pd.concat([now, odd]), KEPT)
    assert one(result, "O1")["ratio"] == pytest.approx(one(gate(now, KEPT), "O1")["ratio"])
    nothing = gate(side(O1=[float("nan")] * 4, fp32=[100] * 4), KEPT)
    assert not nothing.passed
    assert one(nothing, "O1")["verdict"] == "no number now"


def memory(gib, speed=100.0):
    metrics = {"peak_rss_gib": gib, "mfu": None}
    return table(*[run("O1", f"b{i}", speed + i, metrics=metrics) for i in range(4)])


def test_a_metric_where_lower_is_better_fails_above_its_limit():
    result = gate(memory(1.2), memory(1.0), metrics=["img/s", "peak GiB"])
    assert not result.passed
    rows = result.rows.set_index("metric")
    assert rows["verdict"].to_dict() == {
        "images_per_second": "no difference shown",
        "peak_gib": "worse beyond tolerance",
    }
    values = {"name": "vit_nano (O1)", "metric": "`peak_gib`", "size": "1.20x [1.20, 1.20]"}
    limit = {"accepted": "up to", "limit": 1.05, "verdict": WORSE, "notes": ""}
    assert result.sentences[0] == say("gated", **values, **limit)
    assert result.verdict.endswith(f": 1 {WORSE}.")
    assert gate(memory(1.04), memory(1.0), metrics=["peak_gib"]).passed
    better = gate(memory(0.8), memory(1.0), metrics=["peak_gib"])
    assert one(better, "O1")["verdict"] == "better"


def test_memory_of_ranks_that_began_otherwise_says_so():
    forked, spawned = (memory(1.0).assign(**{START: start}) for start in ("forked", "spawned"))
    told = two_starts("spawned", "forked", "the kept ones")
    for now, said in ((spawned, True), (forked, False), (memory(1.0), False)):
        sentences = gate(now, forked, metrics=["peak_gib", "img/s"]).sentences
        assert [told in text for text in sentences] == [
            "`peak_gib`" in text and said for text in sentences
        ]


def test_a_metric_that_is_unknown_or_that_nobody_has_is_refused():
    with pytest.raises(VitsweepError, match=r"`speed` .*img/s.*step_time_ms"):
        gate(KEPT, KEPT, metrics=["speed"])
    with pytest.raises(VitsweepError, match="`throughput_spread`"):
        gate(KEPT, KEPT, metrics=["throughput_spread"])
    with pytest.raises(VitsweepError, match="`mfu`"):
        gate(memory(1.0), memory(1.0), metrics=["img/s", "mfu"])


def paired_days(day, o1):
    """A machine whose pace changes from block to block, and by `day` as a whole."""
    pace = [day * f for f in (1.0, 1.2, 0.8, 1.1)]
    noise = (1, 1.01, 0.99, 1)
    variant = [o1 * p * e for p, e in zip(pace, noise, strict=True)]
    return side(fp32=[100 * p for p in pace], O1=variant)


def test_the_speedup_is_compared_within_blocks():
    baselines = {"O1": "fp32", "fp32": "fp32"}
    kept = paired_days(1.0, 150)
    slow_day = gate(
        paired_days(0.5, 150), kept, metrics=["speedup"], baselines=baselines, lenient=True
    )
    assert slow_day.passed
    assert one(slow_day, "O1")["metric"] == "speedup"
    assert one(slow_day, "fp32")["verdict"] == "baseline slower"
    worse = gate(paired_days(1.0, 120), kept, metrics=["speedup"], baselines=baselines)
    assert one(worse, "O1")["verdict"] == "worse beyond tolerance"
    assert one(worse, "O1")["ratio"] == pytest.approx(0.8)
    # in absolute throughput the noise of the machine hides it
    assert gate(paired_days(1.0, 120), kept).passed
    alone = gate(kept, kept, metrics=["speedup"])
    assert set(alone.rows["metric"]) == {"images_per_second"}, "no cell has a baseline"


def test_a_baseline_is_compared_once_by_its_throughput_whatever_is_asked_for():
    kept, baselines = steady(c0=1.0, c1=1.2), {"c0": "c0", "c1": "c0"}
    for metrics in (["speedup", "img/s"], ["img/s", "speedup"]):
        rows = gate(kept, kept, metrics=metrics, baselines=baselines).rows
        asked = rows.groupby("cell_id")["metric"].apply(sorted).to_dict()
        assert asked == {"c0": ["images_per_second"], "c1": ["images_per_second", "speedup"]}
    gone = gate(kept, kept, baselines=baselines | {"c1": "left"}).rows.set_index("cell_id")
    assert gone.loc["c1", "metric"] == "images_per_second", "its baseline is on neither side"


def test_nothing_in_common_and_a_wrong_tolerance_are_refused():
    with pytest.raises(VitsweepError, match="`--against`"):
        gate(side(bf16=[1, 1, 1]), KEPT)
    with pytest.raises(VitsweepError, match=r"`--against`.*`precision=fp32`"):
        gate(side(tf32=[100, 101, 99]), side(fp32=[100, 101, 99]))
    with pytest.raises(VitsweepError, match="`tolerance=5`"):
        gate(KEPT, KEPT, tolerance=5)


@pytest.mark.slow
def test_equal_sweeps_fail_in_at_most_5_percent():
    generator = np.random.default_rng(1)
    failed = 0
    for _ in range(12):
        speeds = generator.lognormal(0, 0.02, (2, 5, 5))
        sides = [side(**{f"p{c}": list(100 * s) for c, s in enumerate(half)}) for half in speeds]
        failed += not gate(*sides, tolerance=0.0).passed
    assert failed <= 2


def test_a_slower_cell_fails_although_it_ran_out_of_memory_in_a_block_too():
    slow = [run("O1", f"b{i}", speed, precision="O1") for i, speed in enumerate([75, 76, 74, 75])]
    lost = run("O1", "b9", None, precision="O1", status=Status.out_of_memory)
    now = table(*slow, lost)
    result = gate(now, side(O1=[150, 151, 149, 150]), lenient=True)
    assert not result.passed
    assert one(result, "O1")["verdict"] == "worse beyond tolerance"


def test_a_run_that_was_killed_and_made_up_for_is_no_loss():
    same = [run("O1", f"b{i}", speed, precision="O1") for i, speed in enumerate([150, 151, 149])]
    killed = run("O1", "b9", None, precision="O1", status=Status.killed)
    assert gate(table(*same, killed), side(O1=[150, 151, 149])).passed


@pytest.mark.parametrize("now", [0.0, None])
def test_an_accuracy_that_is_gone_fails(now):
    result = gate(accuracy(now, now, now), accuracy(0.9, 0.9, 0.9), metrics=["img/s"])
    assert not result.passed
    assert any("accuracy fell" in s for s in result.sentences)


def test_a_cell_without_a_baseline_is_compared_by_its_throughput():
    kept = side(fp32=[100, 101, 99, 100], O1=[150, 151, 149, 150], alone=[90, 91, 89, 90])
    now = side(fp32=[100, 101, 99, 100], O1=[150, 151, 149, 150], alone=[30, 31, 29, 30])
    result = gate(now, kept, baselines={"O1": "fp32", "fp32": "fp32", "alone": None})
    assert not result.passed
    assert one(result, "alone")["metric"] == "images_per_second"


SAME: dict[str, str | None] = {"c0": "c0", "c1": "c0", "c2": "c0"}


def steady(**factors):
    """Cells of 100 img/s times a factor, half a percent from run to run."""
    noise = (1.0, 1.005, 0.995, 1.002, 0.998)
    return side(**{c: [100 * f * e for e in noise] for c, f in factors.items()})


@pytest.mark.parametrize("others", [1.0, 0.7])
def test_a_baseline_that_became_slower_fails_though_every_ratio_is_as_good_or_better(others):
    kept = steady(c0=1.0, c1=1.2, c2=1.3)
    now = steady(c0=0.7, c1=1.2 * others, c2=1.3 * others)
    result = gate(now, kept, baselines=SAME)
    assert not result.passed
    assert one(result, "c0")["verdict"] == "baseline slower"
    assert result.verdict.endswith(": 1 baseline slower.")
    assert "throughput at 0.70x [" in result.sentences[0]
    lenient = gate(now, kept, baselines=SAME, lenient=True)
    assert lenient.passed
    assert "1 baseline slower" in lenient.verdict
    assert lenient.sentences[0].startswith("Warning: c0 (c0): throughput at 0.70x [")
    assert gate(now, kept, baselines=SAME, mixed_hardware=True).passed, "another machine is no news"


def test_the_verdict_names_a_baseline_that_became_faster():
    kept, now = steady(c0=1.0, c1=1.2), steady(c0=1.4, c1=1.2)
    result = gate(now, kept, baselines=SAME)
    assert not result.passed
    assert "c0 (1.40x [" in result.verdict
    assert "c1 (" not in result.verdict
    for metrics, is_named in (
        (["speedup", "img/s"], True),
        (["img/s", "speedup"], True),
        (["img/s"], False),
    ):
        asked = gate(now, kept, baselines=SAME, metrics=metrics)
        assert ("c0 (1.40x [" in asked.verdict) == is_named
        assert not gate(now, kept, baselines=SAME, metrics=metrics, mixed_hardware=True).faster
    assert "c0 (" not in gate(kept, kept, baselines=SAME).verdict


def test_within_the_tolerance_is_reported_only_where_the_whole_interval_is():
    kept = side(O1=[150, 151, 149, 150, 150])
    unsure = gate(side(O1=[110, 142, 120, 139, 121]), kept)
    row = one(unsure, "O1")
    assert row["ratio_low"] < 0.95 < row["ratio_high"] < 1
    assert row["verdict"] == "undecided"
    assert unsure.undecided
    assert not unsure.passed
    assert unsure.verdict.endswith(": 1 undecided.")
    assert 8 <= unsure.blocks_to_decide <= 40
    assert gate(side(O1=[110, 142, 120, 139, 121]), kept, lenient=True).passed
    sure = gate(side(O1=[146, 147, 145, 146, 146]), kept)
    assert one(sure, "O1")["ratio_low"] >= 0.95
    assert one(sure, "O1")["verdict"] == "worse within tolerance"
    assert sure.passed


def test_a_pass_says_how_small_a_loss_it_would_have_caught():
    generator = np.random.default_rng(0)
    cells = {"base": 1.0} | {f"c{i}": 1.0 for i in range(15)}
    (kept, baselines), (now, _) = (simulate(cells, normal(0.03), generator) for _ in range(2))
    result = gate(now, kept, baselines=baselines)
    assert result.passed
    assert "base" in result.sentences[0], "its images per second, a warning"
    least, most = map(float, result.verdict.split("caught is ")[1].split(" %")[0].split(" to "))
    assert 8 < least < 20, "16 cells, 5 blocks, 3 %: about 20 %"
    assert 40 < most < 80, "the baseline, by its images per second"


def test_a_loss_above_100_percent_has_no_exponent():
    noisy = side(O1=[50, 180, 90, 140])
    caught = gate(noisy, noisy, metrics=["step_time_ms"]).caught
    assert re.search(r"caught is \d{3} %", caught), caught


def test_a_device_that_is_not_known_is_not_taken_for_the_same():
    unknown = KEPT.assign(device=None)
    for now, kept in ((unknown, KEPT), (KEPT, unknown), (unknown, unknown)):
        with pytest.raises(VitsweepError, match="an unknown device"):
            gate(now, kept)
        assert gate(now, kept, mixed_hardware=True).passed
