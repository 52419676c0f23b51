"""One row per setting over its seeds, from runs with known answers."""

import re
from math import exp, log, sqrt

import numpy as np
import pytest
from pandas import DataFrame, Series
from scipy.stats import t as student

from tests.builders import run, table
from tests.tables.test_render import printed
from vitsweep.results.record import RunRecord, Status
from vitsweep.tables import replicates as of_repetitions
from vitsweep.tables.cells import cells
from vitsweep.tables.render import CellTable, _time_to_target
from vitsweep.tables.replicates import replicates
from vitsweep.tables.sweep_tables import SweepTables

SPEEDUPS = {1: 1.5, 2: 1.6, 3: 1.7}
BASELINES = {f"O1-{seed}": f"fp32-{seed}" for seed in (1, 2, 3)} | {
    f"fp32-{seed}": f"fp32-{seed}" for seed in (1, 2, 3)
}


def of(precision: str, seed: int, speed: float = 0.0, **more: object) -> list[RunRecord]:
    """Three blocks of one seed, which ran on a machine of another speed than the other seeds."""
    metrics = {"accuracy_top1": 0.9 + 0.01 * seed}
    return [
        run(f"{precision}-{seed}", f"s{seed}b{block}", 100.0 * seed * speed * (1 + block / 10),
            metrics=metrics, precision=precision, seed=seed, **more)  # type: ignore[arg-type]
        for block in range(3)
    ]  # fmt: skip


def seeds(*extra: RunRecord, without: tuple[str, ...] = ()) -> DataFrame:
    runs = [r for seed in SPEEDUPS for r in (*of("fp32", seed, 1), *of("O1", seed, SPEEDUPS[seed]))]
    return cells(table(*(r for r in runs if r.cell_id not in without), *extra), BASELINES)


def test_a_setting_has_one_row_with_mean_spread_and_number_of_seeds() -> None:
    found = replicates(seeds(), "seed").set_index("precision")
    assert list(found.index) == ["fp32", "O1"]
    assert "seed" not in found
    row, logs = found.loc["O1"], np.log(list(SPEEDUPS.values()))
    assert (row["replicates"], row["replicates_asked"], row["blocks"]) == (3, 3, 9)
    assert row["cell_ids"] == "O1-1,O1-2,O1-3"
    assert row["speedup"] == pytest.approx(exp(logs.mean()))
    half = student.ppf(0.975, 2) * logs.std(ddof=1) / sqrt(3)
    assert row["speedup_low"] == pytest.approx(exp(logs.mean() - half))
    assert row["speedup_high"] == pytest.approx(exp(logs.mean() + half))
    assert row["speedup_sd"] == pytest.approx(0.1)
    assert row["accuracy_top1"] == pytest.approx(0.92)
    assert row["accuracy_top1_sd"] == pytest.approx(0.01)
    half = student.ppf(0.975, 2) * 0.01 / sqrt(3)
    assert row["accuracy_top1_low"] == pytest.approx(0.92 - half)
    assert row["accuracy_top1_high"] == pytest.approx(0.92 + half)
    assert row["claim"] == "faster"


def test_the_ratio_of_two_rows_is_the_speedup() -> None:
    found = replicates(seeds(), "seed").set_index("precision")
    ratio = found.loc["O1", "images_per_second"] / found.loc["fp32", "images_per_second"]
    assert ratio == pytest.approx(found.loc["O1", "speedup"])
    base = found.loc["fp32"]
    assert (base["claim"], base["speedup"], base["baseline_cell_id"]) == ("baseline", 1, "fp32-1")
    per_second = [110.0, 220.0, 330.0]  # the median over the blocks of each seed
    assert log(base["images_per_second"]) == pytest.approx(np.log(per_second).mean())
    assert base["images_per_second_sd"] == pytest.approx(np.std(per_second, ddof=1))


def test_a_seed_that_failed_is_named_and_does_not_count() -> None:
    lost = run("O1-3", "s3b0", status=Status.diverged, precision="O1", seed=3)
    found = replicates(seeds(lost, without=("O1-3",)), "seed").set_index("precision").loc["O1"]
    assert (found["replicates"], found["replicates_asked"]) == (2, 3)
    assert found["status"] == Status.measured
    assert found["reason"].startswith("2 of 3 ")
    assert found["reason"].endswith(": seed=3 diverged")
    assert found["speedup"] == pytest.approx(sqrt(1.5 * 1.6))
    assert np.isnan(found["speedup_low"])
    assert found["claim"] == "too few repetitions"


def test_a_setting_without_a_measured_seed_keeps_status_and_reason() -> None:
    lost = [
        run(f"O3-{seed}", status=Status.failed, reason="KeyError", precision="O3", seed=seed)
        for seed in (1, 2)
    ]
    found = replicates(seeds(*lost), "seed").set_index("precision").loc["O3"]
    assert (found["status"], found["reason"], found["replicates"]) == ("failed", "KeyError", 0)


@pytest.mark.parametrize("status", [Status.failed, Status.killed])
def test_a_setting_that_lost_a_seed_as_others_lose_a_block_is_not_called_faster(
    status: Status,
) -> None:
    gone = run("O1-4", "s4b0", status=status, precision="O1", seed=4)
    row = replicates(seeds(gone), "seed").set_index("precision").loc["O1"]
    assert (row["replicates"], row["claim"]) == (3, "missing blocks")


def test_settings_that_differ_in_anything_else_stay_separate() -> None:
    wide = {"world_size": 4, "ranks_per_node": 4}
    runs = table(*of("fp32", 1, 1), *of("fp32", 2, 1, **wide), *of("fp32", 3, 1))
    found = replicates(cells(runs, {}), "seed").set_index("world_size")["replicates"]
    assert found.to_dict() == {2: 2, 4: 1}


def test_the_terminal_and_the_answer_show_settings() -> None:
    lost = run("O1-3", "s3b0", status=Status.diverged, precision="O1", seed=3)
    found = replicates(seeds(lost, without=("O1-3",)), "seed")
    text = printed(CellTable(found, "seeds"), 140)
    assert "[1] 2 of 3 " in text
    assert ": seed=3 diverged" in text
    assert "92.0 ± 1.0 %" in text
    assert "2 settings, all measured" in text
    whole = replicates(seeds(), "seed")
    assert "replicates: 3" in printed(CellTable(whole, "seeds"), 140)


def with_commands(commands: list[dict[str, object]]) -> SweepTables:
    found = SweepTables()
    found.__dict__["commands"] = commands
    return found


def test_the_key_is_that_of_the_latest_command() -> None:
    assert with_commands([{"replicate": None}, {"replicate": "seed"}]).replicate_key == "seed"
    assert with_commands([{"replicate": "seed"}, {"question": ""}]).replicate_key == ""
    assert with_commands([]).replicate_key == ""


def to_target(*seconds: float | Status | None, epoch: float = 1.0) -> Series:
    """The row of one setting whose seeds reached the target after these seconds, never, or ended so."""
    runs = [
        run(f"fp32-{seed}", f"s{seed}b{block}", 100.0, precision="fp32", seed=seed,
            **({"status": after, "reason": "..."} if isinstance(after, Status)
               else {"metrics": {"seconds_to_target": after,
                                "epochs_to_target": after and round(after / epoch)}}),
            **{"task.target_accuracy": 0.9, "task.evaluate_every_epochs": 1})
        for seed, after in enumerate(seconds)
        for block in range(3)
    ]  # fmt: skip
    own = {f"fp32-{seed}": f"fp32-{seed}" for seed in range(len(seconds))}
    return replicates(cells(table(*runs), own), "seed").iloc[0]


def test_a_seed_that_never_arrived_is_not_left_out_of_the_time_to_the_target() -> None:
    every = to_target(16.0, 20.0, 25.0)
    assert every["seconds_to_target"] == pytest.approx(20.0), "the geometric mean"
    some = to_target(17.0, 20.4, None)
    assert some["reached_target"] == 2
    assert some["seconds_to_target"] == pytest.approx(20.4), "the median, not the mean of the two"
    few = to_target(17.0, None, None)
    assert np.isnan(few["seconds_to_target"])
    spreads = [c for c in some.index if str(c).startswith("seconds_to_target_")]
    assert some[spreads].isna().all()
    texts = [_time_to_target(row.to_dict()) for row in (every, some, few)]
    assert texts[:2] == ["20.0", "median 20.4 (2 of 3)"]
    assert re.fullmatch(r"[^\d]+ 2 of 3", texts[2])


def test_seeds_that_arrive_at_the_same_evaluation_have_a_wide_interval() -> None:
    row = to_target(20.0, 20.0, 20.0, epoch=4.0)
    half = student.ppf(0.975, 2) * (1 / 5) / sqrt(12) / sqrt(3)
    assert row["seconds_to_target_high"] == pytest.approx(20.0 * exp(half))
    assert row["seconds_to_target_low"] == pytest.approx(20.0 * exp(-half))


@pytest.mark.full
def test_the_time_to_the_target_knows_that_evaluations_are_rare() -> None:
    """Seeds that need 4.8 to 5.6 epochs arrive after 5 or 6: of three, often all after the same."""
    generator, held, number = np.random.default_rng(0), 0, 40
    for _ in range(number):
        epochs = np.ceil(generator.normal(5.2, 0.3, 3))
        seconds = 4.0 * epochs * np.exp(generator.normal(0, 0.01, 3))
        row = to_target(*seconds, epoch=4.0)
        held += row["seconds_to_target_low"] <= 4.0 * 5.73 <= row["seconds_to_target_high"]
    assert held >= 0.93 * number


@pytest.mark.parametrize("status", [Status.diverged, Status.timed_out, Status.failed])
def test_a_seed_that_ended_by_itself_never_arrived(status: Status) -> None:
    lost = to_target(6.0, 7.0, 8.0, status, status)
    assert _time_to_target(lost.to_dict()) == "median 8.00 (3 of 5)"
    assert to_target(6.0, 7.0, 8.0, Status.killed)["seconds_to_target"] < 7.0, "it says nothing"


def test_means_and_spreads_of_repetitions() -> None:
    nan, inf = np.nan, np.inf
    for values, median in (
        ([1, nan, 3], 3),
        ([3, 1, 2], 2),
        ([1, nan], nan),
        ([1, 2, nan, 5], 3.5),
        ([nan], nan),
    ):
        assert of_repetitions._median(Series(values)) == pytest.approx(median, nan_ok=True)
    for values, metric, mean in (
        ([1.0, 4.0, nan], "images_per_second", 2), ([1.0, 4.0], "accuracy_top1", 2.5), ([nan], "x", nan),
        ([0.0, 4.0], "images_per_second", 2), ([1.0, inf], "accuracy_top1", inf),
    ):  # fmt: skip
        assert of_repetitions._mean(Series(values), metric) == pytest.approx(mean, nan_ok=True)
    t2 = student.ppf(0.975, 2) / sqrt(3)
    plain = of_repetitions._spread(Series([1.0, 2, 3, nan]), "accuracy_top1")
    assert list(plain.values()) == pytest.approx([1, 2 - t2, 2 + t2])
    logs = of_repetitions._spread(Series(np.exp([1.0, 2, 3])), "images_per_second")
    assert list(logs.values())[1:] == pytest.approx([exp(2 - t2), exp(2 + t2)])
    hidden = of_repetitions._spread(Series(np.exp([1.0, 2, 3])), "seconds_to_target", 0.03)
    half = np.hypot(t2, student.ppf(0.975, 2) * sqrt(0.01))
    assert list(hidden.values())[1:] == pytest.approx([exp(2 - half), exp(2 + half)])
    two = of_repetitions._spread(Series([1.0, 3.0]), "accuracy_top1", 0.03)
    assert list(two.values()) == pytest.approx([sqrt(2), nan, nan], nan_ok=True)
    assert np.isnan(list(of_repetitions._spread(Series([1.0]), "accuracy_top1").values())).all()


def test_times_to_a_target_are_rounded_by_rare_evaluations_and_censored() -> None:
    good = DataFrame({"epochs_to_target": [4.0, 8.0], "task.evaluate_every_epochs": [2, 2]})
    assert of_repetitions._rounding(good) == pytest.approx(0.375**2 / 12)
    assert of_repetitions._rounding(good.assign(epochs_to_target=np.nan)) == 0
    assert of_repetitions._rounding(good[["epochs_to_target"]]) == 0
    tried = DataFrame({"task.target_accuracy": [0.9] * 3, "seconds_to_target": [1.0, np.nan, 2.0]})
    assert (of_repetitions._reached(tried), of_repetitions._missed(tried)) == (2, 1)
    for without in (
        tried.assign(**{"task.target_accuracy": np.nan}),
        tried[["task.target_accuracy"]],
        tried[["seconds_to_target"]],
    ):
        assert of_repetitions._reached(without) is of_repetitions._missed(without) is None


def test_a_setting_says_which_repetitions_were_not_measured_and_why() -> None:
    def outcome(*ends: tuple[str, str | None]) -> tuple[str, str]:
        group = DataFrame(
            [{"seed": n, "status": s, "reason": why} for n, (s, why) in enumerate(ends, 1)]
        )
        found = of_repetitions._outcome(group, group[group["status"] == "measured"], "seed")
        return found["status"], found["reason"]

    good = ("measured", None)
    assert outcome(good, good) == ("measured", "")
    assert outcome(("failed", "x"), ("failed", "x")) == ("failed", "x")
    status, reason = outcome(good, ("out_of_memory", "x"), ("out_of_memory", "x"))
    assert status == "measured"
    assert reason.startswith("1 of 3 seeds ")
    assert reason.endswith(": seed=2 out of memory, seed=3 out of memory (x)")
    assert outcome(good, ("failed", "x"), ("failed", "y"))[1].endswith(
        "seed=2 failed, seed=3 failed"
    )
    status, reason = outcome(("failed", "x"), ("killed", "x"))
    assert status == "failed"
    assert reason.startswith("0 of 2 seeds ")


def test_a_table_without_the_key_or_without_rows_has_no_settings() -> None:
    known = seeds()
    for none in (replicates(known, "nosuch"), replicates(known[:0], "seed")):
        assert none.empty
        assert "speedup" in none
