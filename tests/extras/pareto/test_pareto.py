"""The Pareto front: which cells stand on it, and how it is drawn."""

import math

import numpy as np
import pytest

from tests.builders import run, table
from tests.charts.test_more_charts import legend
from tests.sample_sweep import sweep
from tests.tables.test_budget import four as four
from vitsweep.extras.pareto.charts.pareto import draw, pareto_front, undominated
from vitsweep.tables.cells import cells


def test_the_front_holds_what_nothing_beats(four):
    front = pareto_front(four).set_index("cell_id")["on_front"]
    assert front.to_dict() == {"fast": True, "lean": True, "worse": False, "base": False}


def test_one_training_makes_accuracy_no_objective_of_the_others(four):
    trained = four.assign(
        accuracy_top1=[0.9 if c == "worse" else math.nan for c in four["cell_id"]]
    )
    front = pareto_front(trained).set_index("cell_id")
    assert front["on_front"].to_dict() == {"fast": True, "lean": True, "worse": True, "base": False}
    assert front.loc["worse", "objectives"] == "images_per_second, peak_gib, accuracy_top1"
    assert front.loc["fast", "objectives"] == "images_per_second, peak_gib"


def test_objectives_that_nobody_measured_are_left_out(four):
    assert pareto_front(four)["objectives"].iloc[0] == "images_per_second, peak_gib"


def test_equal_cells_are_both_on_the_front():
    points = np.array([[3.0, 1.0], [1.0, 3.0], [1.0, 1.0], [3.0, 1.0], [2.0, 2.0]])
    assert undominated(points).tolist() == [True, True, False, True, True]


def test_the_front_of_long_names_leaves_the_axes_their_width():
    names = [f"c{n}" for n in range(3)]
    runs = table(
        *(
            run(
                c,
                speed,
                images_per_second=speed,
                metrics={"peak_rss_gib": speed},
                precision=c + "x" * 70,
            )
            for c, speed in zip(names, (100.0, 110.0, 120.0), strict=True)
        )
    )
    figure = draw(pareto_front(cells(runs, dict.fromkeys(names))))
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().width > 0.6
    assert len(figure.legends[0].get_texts()) == 3


@pytest.mark.smoke
def test_the_front_is_filled_and_numbered():
    table = pareto_front(sweep("speedups").cells)
    axes = draw(table).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (
        "Peak memory, worst rank (GiB)", "Throughput, all ranks (img/s)"
    )  # fmt: skip
    entries = legend(axes)
    assert axes.figure.legends[0].get_title().get_text() == "On the front"
    assert len(entries) == table["on_front"].sum()
    assert entries[0].startswith("1  O3")
