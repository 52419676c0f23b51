"""A race in words, as a table and as a chart: who leads, who left when and why, which figures to trust."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.collections import LineCollection

import vitsweep
from tests.command import ROOT
from vitsweep.charts import race as chart
from vitsweep.racing.cells import write_race
from vitsweep.results.store import Store
from vitsweep.tables.race import race_answer, race_history, race_lines, race_table, race_text


def of_cell(cell: str, blocks: list[int], gain: float, **more: Any) -> dict[str, Any]:
    return {
        "cell_id": cell,
        "name": f"x={cell}",
        "blocks": blocks,
        "gain": gain,
        "gain_sd": 0.01,
        **more,
    }


@pytest.fixture
def race() -> dict[str, Any]:
    """Six blocks: `a` leads to `b` and the baseline `p`; `c` is dropped, `d` failed, `e` never ran."""
    confirmed = {
        "p": {"num_blocks": 5, "speedup": 1.31, "speedup_low": 1.27, "speedup_high": 1.35},
        "b": {"num_blocks": 5, "speedup": 1.02, "speedup_low": 0.99, "speedup_high": 1.05},
    }
    rounds = [
        {"blocks": 4, "runs": 20, "leader": "b", "alive": 4, "chance_of_better": 0.4},
        {"blocks": 5, "runs": 24, "leader": "a", "alive": 3, "chance_of_better": 0.03},
        {"blocks": 6, "runs": 28, "leader": "a", "alive": 3, "chance_of_better": 0.02},
    ]
    cells = [
        of_cell("p", [0, 1, 2, 3, 4, 5], -0.27, dropped_after=5),
        of_cell("a", [0, 4, 5], 0.0),
        of_cell("b", [1, 3, 5], -0.01),
        of_cell("c", [2], -0.2, dropped_after=4),
        of_cell("d", [], -0.1, left_after=1, reason="out_of_memory: 3 GiB"),
        of_cell("e", [], -0.02),
    ]
    return {
        "ended": "settled", "objective": "throughput", "indifference": 0.02, "level": 0.05,
        "memory_limit_gib": None, "budget": "sweep.minutes=30", "seconds": 300.0, "num_runs": 43,
        "num_blocks": 6,
        "num_start_blocks": 4, "grid_runs": 86, "grid_blocks": 5, "leader": "a", "runner_up": "b",
        "baseline": "p", "odd_runs": 0.1, "rounds": rounds, "cells": cells, "confirmed": confirmed,
        "scales": {"main": 0.1, "pairs": 0.02, "residual": 0.01, "noise": 0.03}, "seeds": [0],
    }  # fmt: skip


def test_the_table_says_what_became_of_every_cell(race: dict[str, Any]) -> None:
    table = race_table(race).set_index("cell_id")
    assert table["state"].to_dict() == {
        "a": "leader", "b": "runner-up", "p": "dropped", "c": "dropped", "d": "out", "e": "never ran",
    }  # fmt: skip
    assert table.index.tolist() == ["a", "b", "p", "c", "d", "e"]
    assert table["last_block"].to_dict() == {"a": 6, "b": 6, "p": 5, "c": 4, "d": 2, "e": 6}
    assert table.loc["c", "reason"] == "shown slower than the leader after block 4"
    assert table.loc["d", "reason"] == "out_of_memory: 3 GiB"
    assert table.loc["b", "to_leader"] == pytest.approx(0.990, abs=1e-3)
    text = race_text(race_table(race))
    assert text["to the leader"].tolist()[:2] == ["", "0.99x [0.97, 1.01]"]
    assert text["blocks"].tolist()[:2] == ["1 to 6", "2 to 6"]


def test_the_answer_gives_the_ratios_of_fresh_blocks_and_says_that_they_chose_nothing(
    race: dict[str, Any],
) -> None:
    assert race_answer(race) == (
        "x=a leads in throughput: 1.31x [1.27, 1.35] against the baseline x=p and 1.02x [0.99, 1.05] "
        "against the runner-up x=b, over 5 fresh blocks that had no part in the choice."
    )
    race["confirmed"] = {}
    assert (
        "1.31x against the baseline x=p by the race's model, uncorrected and without an interval"
        in race_answer(race)
    )


def test_the_answer_names_the_objective(race: dict[str, Any]) -> None:
    race["objective"] = "throughput_per_cost"
    assert race_answer(race).startswith(
        "x=a leads in throughput per cost: 1.31x [1.27, 1.35] against"
    )
    race["objective"] = "time_to_accuracy"
    assert race_answer(race).startswith(
        "x=a reaches the accuracy first: 1.31x [1.27, 1.35] as fast as the baseline x=p and 1.02x"
    )


def test_the_answer_stays_short_where_cells_have_many_settings(race: dict[str, Any]) -> None:
    names = {
        "a": "precision=O1 optimizer=adamw_fused memory=keep_all",
        "b": "precision=O1 optimizer=adamw_foreach memory=keep_all",
        "p": "precision=fp32 optimizer=adamw_loop memory=keep_all",
    }
    for cell in race["cells"]:
        cell["name"] = names.get(cell["cell_id"], cell["name"])
    answer = race_answer(race)
    assert "against the baseline precision=fp32 optimizer=adamw_loop and" in answer
    assert "against the runner-up optimizer=adamw_foreach, over 5" in answer
    assert len(answer) < 4 * 80


def test_the_answer_says_where_the_baseline_leads(race: dict[str, Any]) -> None:
    race["baseline"] = "a"
    assert race_answer(race).startswith(
        "x=a, the baseline, leads in throughput: 1.02x [0.99, 1.05] against the runner-up x=b, over 5"
    )


def test_the_answer_names_the_baseline_once_where_it_is_the_runner_up(race: dict[str, Any]) -> None:
    race |= {"runner_up": "p", "confirmed": {"p": {"num_blocks": 1, "speedup": 1.3,
             "speedup_low": None, "speedup_high": None}}}  # fmt: skip
    assert race_answer(race) == (
        "x=a leads in throughput: 1.30x against the baseline, which is the runner-up, x=p, over 1 fresh "
        "block that had no part in the choice, too few for an interval."
    )


def test_a_cell_that_failed_before_its_first_run_has_no_ratio(race: dict[str, Any]) -> None:
    table = race_table(race).set_index("cell_id")
    assert table["to_leader"].isna()["d"]
    assert table["to_leader"].notna()["e"], "predicted by the model, and still in the race"


def test_how_a_race_ended_what_it_cost_and_whose_figure_the_5_percent_is(
    race: dict[str, Any],
) -> None:
    end, cost, model = race_lines(race)
    assert end.startswith(
        "Settled if effects add up; 1 cell never ran: the probability that a cell"
    )
    assert "43 runs in 5.00 min" in cost
    assert "86 runs, about 10.0 min: the race took 50 % of its runs" in cost
    assert model.startswith("The 5 % holds under the race's model")


def test_a_race_whose_other_cells_were_all_dropped_says_so(race: dict[str, Any]) -> None:
    race["rounds"][-1] |= {"alive": 1, "chance_of_better": 0.0}
    race["cells"] = [cell for cell in race["cells"] if cell["cell_id"] != "e"]
    assert race_lines(race)[0] == "Settled: all other cells were shown slower than the leader."


def test_a_cell_without_a_run_is_never_shown_slower(race: dict[str, Any]) -> None:
    """Its row, its line of the end and its state say that it is a prediction."""
    race["cells"][-1]["dropped_after"] = 5
    row = race_table(race).set_index("cell_id").loc["e"]
    assert row["state"] == "never ran"
    assert row["reason"] == "predicted slower than the leader from other cells after block 5"
    race["rounds"][-1] |= {"alive": 1, "chance_of_better": 0.0}
    end = race_lines(race)[0]
    assert end.startswith(
        "Settled if effects add up; 1 cell never ran: all other cells were shown, or"
    )


def test_a_race_says_that_a_cell_drifted(race: dict[str, Any]) -> None:
    race["cells"][1]["drift"] = -0.105
    assert any(
        "x=a drifted: its ratio to the baseline changed by -10 %" in line
        for line in race_lines(race)
    )


def test_a_race_that_was_sure_once_says_what_it_lacks(race: dict[str, Any]) -> None:
    race["ended"] = "budget"
    race["rounds"][-1]["chance_of_better"] = 0.0
    end = race_lines(race)[0]
    assert (
        "is under 1 %, and has to be at most 5 % in two consecutive rounds. Still open: x=b" in end
    )


def test_a_race_that_took_longer_than_its_budget_says_why(race: dict[str, Any]) -> None:
    race |= {"budget": "sweep.minutes=4", "budget_seconds": 240.0}
    assert "That is 1.00 min more than `sweep.minutes=4`." in race_lines(race)[1]


def test_an_unsettled_race_names_what_is_still_open(race: dict[str, Any]) -> None:
    race["ended"] = "budget"
    end = race_lines(race)[0]
    assert end.startswith("Not settled, the budget is spent: the probability")
    assert "Still open: x=b; x=e." in end
    race["budget"] = None
    assert "Not settled, it cost as much as the full grid" in race_lines(race)[0]


def test_a_notebook_says_that_a_race_is_not_settled(race: dict[str, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "analysis" / "sample", tmp_path / "sample")
    write_race(folder, race | {"ended": "budget"})
    Store(folder).append_command({"search": "race", "cells": []})
    assert "Not settled, the budget is spent" in vitsweep.load(folder)._repr_html_()


def test_a_rugged_landscape_is_said(race: dict[str, Any]) -> None:
    assert not any("rugged" in line for line in race_lines(race))
    race["scales"]["residual"] = 0.03
    assert any("The landscape is rugged" in line for line in race_lines(race))


def test_a_race_that_ended_before_its_first_round_has_no_result(race: dict[str, Any]) -> None:
    for key in ("leader", "runner_up", "baseline", "rounds", "scales", "odd_runs"):
        del race[key]
    race |= {"ended": "budget", "num_runs": 0}
    assert race_answer(race) == "The race has no result yet: no two cells were measured."
    assert race_lines(race) == [
        "The race ended before its first round; the same command continues it."
    ]


def test_the_chart_has_a_line_per_cell_that_ran_and_a_dot_per_run(race: dict[str, Any]) -> None:
    table = race_history(race)
    assert dict(zip(table["cell_id"], table["led"], strict=True))["a"] == [(5, 5), (6, 6)]
    [axes] = chart.draw(table).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["x=a", "x=b", "x=p", "x=c"]
    dots = {len(line.get_xdata()) for line in axes.lines if line.get_marker() == "o"}
    assert dots == {3, 6, 1}
    ends = [c.get_segments()[0][1][0] for c in axes.collections if isinstance(c, LineCollection)]
    assert {6.0, 5.0, 4.0} <= set(ends)


@pytest.fixture
def front(race: dict[str, Any]) -> dict[str, Any]:
    """The same race for throughput against peak memory: `a` is fastest, `b` is on the front too."""
    found = {"speedup": 1.31, "speedup_low": 1.27, "speedup_high": 1.35, "num_blocks": 5}
    race["confirmed"] = {"a": {**found, "memory": 1.2}, "b": {**found, "memory": 0.5}}
    race |= {"objective": ["throughput", "peak_memory"], "front": ["a", "b"]}
    for round_ in race["rounds"]:
        round_["front"] = ["a", "b"]
    for cell in race["cells"]:
        cell["memory_gain"] = -0.7 if cell["cell_id"] == "b" else 0.0
    return race


def test_a_front_is_told_with_the_throughput_and_the_memory_of_each_of_its_cells(
    front: dict[str, Any],
) -> None:
    assert race_answer(front) == (
        "The Pareto front of throughput against peak memory has 2 cells: x=a (1.31x [1.27, 1.35], 1.20x "
        "the memory); x=b (1.31x [1.27, 1.35], 0.50x the memory); ratios to the baseline over 5 fresh "
        "blocks that had no part in the choice."
    )
    assert "better than one of the front by more than 2 % in both" in race_lines(front)[0]
    table = race_table(front).set_index("cell_id")
    assert table["state"].to_dict()["b"] == "front"
    assert "that needs no more memory" in table.loc["c", "reason"]
    assert table.loc["b", "memory_to_leader"] == pytest.approx(0.497, abs=1e-3)
    assert race_text(race_table(front))["memory"].tolist()[:2] == ["1.00x", "0.50x"]
    led = dict(zip(race_table(front)["cell_id"], race_history(front)["led"], strict=True))
    assert led["b"] == [(1, 4), (5, 5), (6, 6)]
    assert chart.draw(race_history(front)).axes


def test_a_race_for_the_time_to_an_accuracy_names_its_seeds(race: dict[str, Any]) -> None:
    race["objective"] = "time_to_accuracy"
    assert any("those of seed 0." in line for line in race_lines(race))
    race["seeds"] = [0, 1, 2]
    assert any("those of seeds 0, 1, 2." in line for line in race_lines(race))


def test_the_chart_names_cells_by_what_tells_them_apart() -> None:
    cells = ["precision=O1 model.depth=2 sharding=none", "precision=O2 model.depth=4 sharding=none"]
    assert chart._short([*cells, "plain"]) == ["O1 · depth=2", "O2 · depth=4", "plain"]
    assert chart._short(["plain"]) == ["plain"]
