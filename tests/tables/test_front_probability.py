"""The probability of being on the Pareto front: sure, even, impossible, unknown."""

import numpy as np
import pytest

from tests.builders import run, table
from tests.noise import normal, simulate
from vitsweep.tables.cells import cells
from vitsweep.tables.pareto import front_probability, pareto_front, undominated


def front(truth, peaks, spread=0.01, seed=0, **kwargs):
    runs, baselines = simulate(truth, normal(spread), np.random.default_rng(seed), **kwargs)
    runs = runs.assign(peak_rss_gib=runs["cell_id"].map(peaks))
    found = pareto_front(cells(runs, baselines), runs=runs)
    return found.set_index("cell_id")["on_front_probability"]


def test_clear_cells_are_surely_on_or_off_the_front():
    found = front({"base": 1.0, "fast": 1.5, "bad": 0.7}, {"base": 1.0, "fast": 2.0, "bad": 2.0})
    assert found[["base", "fast", "bad"]].tolist() == [1.0, 1.0, 0.0]


def test_equal_cells_share_the_front():
    truth = {f"c{i}": 1.0 for i in range(5)}
    means = np.mean(
        [front(truth, dict.fromkeys(truth, 1.0), 0.03, seed).to_numpy() for seed in range(8)],
        axis=0,
    )
    assert means.sum() == pytest.approx(1.0, abs=1e-6)
    assert front(truth, dict.fromkeys(truth, 1.0), 0.03).between(0.001, 0.9).any()


@pytest.mark.full
def test_the_probability_is_right_as_often_as_it_says():
    sure, right = [], []
    truth = {"base": 1.0, "a": 1.01, "b": 1.02, "c": 0.99}
    for seed in range(40):
        found = front(truth, dict.fromkeys(truth, 1.0), 0.02, seed)
        sure += found.tolist()
        right += [cell == "b" for cell in found.index]
    sure, right = np.array(sure), np.array(right)
    assert right[sure > 0.5].mean() == pytest.approx(sure[sure > 0.5].mean(), abs=0.15)
    assert right[sure < 0.5].mean() == pytest.approx(sure[sure < 0.5].mean(), abs=0.1)


def test_what_a_block_shares_does_not_make_its_cells_less_sure():
    truth, peaks = {"base": 1.0, "fast": 1.1}, {"base": 1.0, "fast": 1.0}
    found = front(truth, peaks, 0.01, block_spread=0.5)
    assert found["fast"] == 1.0


def test_cells_that_no_block_compares_keep_their_levels():
    metrics = {"metrics": {"peak_rss_gib": 1.0}}
    runs = table(
        *(run(c, f"{where}{n}", v + n, minute=n, **metrics)
          for n in range(4) for c, where, v in (("a", "x", 1000), ("b", "x", 900), ("slow", "y", 10)))
    )  # fmt: skip
    found = pareto_front(cells(runs, {}), runs=runs).set_index("cell_id")
    assert found["on_front_probability"][["a", "slow"]].tolist() == [1.0, 0.0]


def test_one_block_says_nothing_about_noise():
    runs = table(run("a", metrics={"peak_rss_gib": 1.0}), run("b", metrics={"peak_rss_gib": 2.0}))
    found = pareto_front(cells(runs, {}), runs=runs)
    assert found["on_front_probability"].isna().all()
    assert found["on_front"].any()


def test_cells_that_lack_an_objective_have_no_probability():
    runs, baselines = simulate({"a": 1.0, "b": 1.2}, normal(0.01), np.random.default_rng(0))
    runs = runs.assign(peak_rss_gib=np.where(runs["cell_id"] == "a", 1.0, np.nan))
    found = pareto_front(cells(runs, baselines), runs=runs).set_index("cell_id")
    assert np.isnan(found.loc["b", "on_front_probability"])
    assert found.loc["a", "on_front_probability"] == 1.0


def test_without_runs_there_is_no_such_column():
    runs = table(run("a", metrics={"peak_rss_gib": 1.0}))
    assert "on_front_probability" not in pareto_front(cells(runs, {}))


def test_the_same_table_gives_the_same_numbers():
    runs, baselines = simulate({"a": 1.0, "b": 1.0}, normal(0.03), np.random.default_rng(0))
    found = cells(runs, baselines)
    twice = [front_probability(found, runs, ["images_per_second"]).tolist() for _ in range(2)]
    assert twice[0] == twice[1]


def test_undominated_by_hand():
    points = np.array([[3.0, 1.0], [1.0, 3.0], [1.0, 1.0], [3.0, 1.0], [2.0, 2.0]])
    assert undominated(points).tolist() == [True, True, False, True, True]
