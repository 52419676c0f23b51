"""Whether accuracy was lost: known answers, and how often the claim is wrong."""

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from pandas import DataFrame
from rich.console import Console
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from tests.builders import run, table
from vitsweep.results.record import RunRecord, Status
from vitsweep.tables.accuracy import (
    MARGIN,
    POINT,
    NonInferiority,
    _points,
    accuracy_claims,
    non_inferiority,
)
from vitsweep.tables.cells import cells
from vitsweep.tables.render import CellTable, cell_text
from vitsweep.tables.replicates import replicates

BASE = {1: 0.950, 2: 0.960, 3: 0.955, 4: 0.945, 5: 0.965}
LOSSES = {
    "O1": (0.001, -0.001, 0.000, 0.001, -0.001),
    "O2": (0.002, 0.012, -0.004, 0.006, 0.003),
    "O3": (0.050, 0.060, 0.055, 0.045, 0.052),
}


def of(precision: str, seed: int, accuracy: float, **more: object) -> RunRecord:
    speed = 100.0 * (1.5 if precision != "fp32" else 1.0)
    metrics = {"accuracy_top1": accuracy, "seconds_to_target": 40.0 if accuracy > 0.95 else None}
    return run(
        f"{precision}-{seed}", f"s{seed}", speed, metrics=metrics, precision=precision, seed=seed,
        **{"task.target_accuracy": 0.95, **more},  # type: ignore[arg-type]
    )  # fmt: skip


def diverged(precision: str, seed: int) -> RunRecord:
    name, target = f"{precision}-{seed}", {"task.target_accuracy": 0.95}
    return run(name, f"s{seed}", status=Status.diverged, precision=precision, seed=seed, **target)


def settings(*extra: RunRecord) -> DataFrame:
    runs = [of("fp32", seed, accuracy) for seed, accuracy in BASE.items()]
    runs += [
        of(precision, seed, BASE[seed] - loss)
        for precision, losses in LOSSES.items()
        for seed, loss in zip(BASE, losses, strict=True)
    ]
    runs = [r for r in runs if r.cell_id not in {e.cell_id for e in extra}] + list(extra)
    baselines = {r.cell_id: f"fp32-{r.cell_id[-1]}" for r in runs}
    return replicates(cells(table(*runs), baselines), "seed").set_index("precision", drop=False)


def test_the_test_is_students_one_sided_on_paired_differences() -> None:
    differences = [-0.002, 0.001, -0.001, 0.0005, -0.0005]
    found = non_inferiority(differences)
    wanted = ttest_1samp(differences, -MARGIN, alternative="greater")
    assert found.p_value == pytest.approx(wanted.pvalue)
    error = np.std(differences, ddof=1) / np.sqrt(5)
    assert found.low == pytest.approx(np.mean(differences) - student.ppf(0.95, 4) * error)
    assert found.high == pytest.approx(np.mean(differences) + student.ppf(0.95, 4) * error)
    assert np.isnan(non_inferiority(differences[:2]).p_value)
    assert found.p_worse == pytest.approx(ttest_1samp(differences, 0, alternative="less").pvalue)
    assert non_inferiority([0.0] * 5) == NonInferiority(0, 0, 0, 0, 0.5)


def test_a_setting_that_gains_on_every_seed_is_better() -> None:
    gained = [of("O1", seed, BASE[seed] + 0.01 + 0.001 * (seed % 2)) for seed in BASE]
    claims = settings(*gained)["accuracy_claim"]
    assert claims["O1"] == "better"


@pytest.mark.parametrize("images", [-2, 3])
def test_repetitions_that_all_lost_the_same_images_show_no_spread(images: int) -> None:
    """Accuracy of 599 images moves in steps of one: three equal differences are no certainty."""
    found = non_inferiority([images / 599] * 3)
    assert found.mean == pytest.approx(images / 599)
    assert np.isnan([found.p_value, found.p_worse, found.low, found.high]).all()


@pytest.mark.parametrize(("loss", "most", "least"), [(MARGIN, 0.06, 0.04), (0.0, 1.0, 0.9)])
def test_of_a_setting_that_loses_the_margin_one_in_twenty_is_called_no_worse(
    loss: float, most: float, least: float
) -> None:
    """5 seeds, paired differences with a deviation of 0.3 points; one that loses nothing is found."""
    generator = np.random.default_rng(5)
    differences = generator.normal(-loss, 0.003 if loss else 0.002, (8000, 5))
    claimed = np.array([non_inferiority(row).p_value < 0.05 for row in differences])
    assert least <= claimed.mean() <= most


def test_of_four_settings_that_lose_nothing_one_sweep_in_twenty_calls_one_worse() -> None:
    names = ("fp32", "O1", "O2", "O3", "bf16")
    groups = [
        DataFrame(
            {
                "device": "cpu", "status": Status.measured, "cell_id": [f"{name}-{s}" for s in BASE],
                "baseline_cell_id": [f"fp32-{s}" for s in BASE],
            }
        )
        for name in names
    ]  # fmt: skip
    generator, wrong = np.random.default_rng(6), 0
    for _ in range(400):
        losses = [np.zeros(5), *generator.normal(0, 0.006, (4, 5))]
        drawn = [
            group.assign(accuracy_top1=[*BASE.values()] - loss)
            for group, loss in zip(groups, losses, strict=True)
        ]
        wrong += "worse" in set(accuracy_claims(drawn, ["fp32"] * 5)["accuracy_claim"])
    assert wrong / 400 < 0.09  # without Holm's adjustment 0.17


def test_settings_are_no_worse_worse_or_neither_is_shown() -> None:
    found = settings()
    claims = found["accuracy_claim"].to_dict()
    assert claims == {"fp32": "baseline", "O1": "no worse", "O2": "not shown", "O3": "worse"}
    assert found.loc["O3", "accuracy_difference"] == pytest.approx(-0.0524)
    assert found.loc["O1", "accuracy_difference_low"] > -MARGIN
    assert (found["accuracy_pairs"] == [0, 5, 5, 5]).all()


def test_a_setting_of_which_one_seed_diverged_is_diverged_whatever_the_others_reached() -> None:
    lost = diverged("O1", 3)
    found = settings(lost).loc["O1"]
    assert found["accuracy_claim"] == "diverged"
    assert found["reason"].startswith("4 of 5 ")
    assert found["reason"].endswith(": seed=3 diverged")


def test_the_table_shows_difference_claim_and_how_many_reached_the_target() -> None:
    text = cell_text(settings())
    row = text[text["cell"] == "O3"].iloc[0]
    assert row["accuracy"] == "worse"
    assert row["top-1 - baseline's"].startswith("-5.24 [-5.7")
    assert row["s to target"] == "not reached"
    assert text[text["cell"] == "baseline"].iloc[0]["s to target"] == "median 40.0 (3 of 5)"


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_says_whether_accuracy_was_lost_and_when_the_target_was_reached(
    width: int,
) -> None:
    screen = StringIO()
    Console(file=screen, width=width).print(CellTable(settings().reset_index(drop=True), "seeds"))
    shown = screen.getvalue()
    row = next(line for line in shown.splitlines() if line.startswith("O3"))
    assert "not reached" in row
    assert ("worse" in row) is (width > 100)
    assert ("`accuracy`" in shown) is (width < 100)
    assert "(`collect --columns`)" in shown
    assert ("-5.24 [-5.77, -4.71]" in row) is (width > 100)
    assert ("`top-1 - baseline's`" in shown) is (width < 100)
    assert max(map(len, shown.splitlines())) <= width
    assert "blocks" not in shown, "their sum over seeds"


def test_a_sweep_without_training_has_no_claim_about_accuracy() -> None:
    names = [(precision, seed) for precision in ("fp32", "O1") for seed in (1, 2)]
    runs = [run(f"{p}-{s}", f"s{s}", 100.0, precision=p, seed=s) for p, s in names]
    baselines = {f"{p}-{s}": f"fp32-{s}" for p, s in names}
    assert "accuracy_claim" not in replicates(cells(table(*runs), baselines), "seed")


def test_an_evaluation_counts_where_all_of_it_is_known() -> None:
    whole = {"epoch": 1, "seconds": 2.0, "accuracy_top1": 0.0, "loss": 3.0}
    curve = [whole, *(whole | {name: None} for name in POINT), {"epoch": 2}]
    record = replace(run("a"), samples={"training": curve})
    assert list(_points(record)) == [{name: whole[name] for name in POINT}]
    assert list(_points(run("a"))) == []
