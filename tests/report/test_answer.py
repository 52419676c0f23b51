"""The sentence at the end of a command, and what it says to type next."""

from math import log, sqrt

import numpy as np

from tests.builders import from_runs, run, table
from tests.said import opening
from vitsweep.report.answer import answers, next_command
from vitsweep.results.record import SCREENING
from vitsweep.tables.sentences import say
from vitsweep.tables.sweep_tables import SweepTables

TYPED = "python -m vitsweep -m precision=O1"


def measured(*ratios: float, **facts: object) -> SweepTables:
    """A cell with O1 beside a baseline with fp32, in blocks with these ratios."""
    records = [
        run(cell, f"b{n}", 100 * speed, minute=n, environment=dict(facts), precision=name)  # type: ignore[arg-type]
        for n, ratio in enumerate(ratios)
        for cell, name, speed in (("base", "fp32", 1.0), ("cell", "O1", ratio))
    ]
    return from_runs(table(*records), {"base": "base", "cell": "base"})


def test_noise_that_hides_everything_is_called_inconclusive() -> None:
    noisy = measured(0.7, 1.5, 0.9, 1.4, 0.8)
    [answer] = answers(noisy)
    assert answer.startswith(opening("none_shown", base="the baseline") + "O1 ")
    assert answer.endswith(f"inconclusive, {say('noisy', noise=34)}.")
    assert next_command(noisy.cells, TYPED) == "", "more than 60 blocks would be needed"


def test_the_noise_that_is_named_is_that_of_one_block_though_blocks_resemble_each_other() -> None:
    ratios = 1 + 0.3 * np.sin(np.arange(16) / 2.5)  # so alike that the interval is 2 times as wide
    noise = np.log(ratios).std(ddof=1)
    for any_look in (False, True):
        [answer] = answers(measured(*ratios, any_look=any_look))
        assert answer.endswith(f"inconclusive, {say('noisy', noise=100 * noise)}.")


def test_a_faster_cell_that_was_never_compared_is_named_before_the_fastest() -> None:
    both = [
        run(c, f"b{n}", v + n, minute=n)
        for n in range(5)
        for c, v in (("base", 100), ("cell", 110))
    ]
    alone = [run("other", f"x{n}", 200 + n, minute=9 + n, precision="O1") for n in range(5)]
    first, second = answers(
        from_runs(table(*both, *alone), dict.fromkeys(("base", "cell", "other"), "base"))
    )
    assert {"202", "O1"} <= {*first.replace(",", "").split()}
    assert opening("no_speedup") in first
    assert "1.10x" in second


def test_a_small_noise_is_a_result() -> None:
    [answer] = answers(measured(1.01, 0.99, 1.0, 1.01, 0.985))
    assert answer.startswith(opening("none_shown"))
    assert "inconclusive" not in answer


def test_what_is_unsure_gets_as_many_blocks_as_would_show_it() -> None:
    assert next_command(measured(1.2, 0.98, 1.1, 1.02, 1.14).cells, TYPED) == (
        f"To be surer: `{TYPED} measurement.blocks=8`."
    )
    unsure = measured(1.2, 0.95, 1.1, 1.02, 1.14, any_look=True).cells
    assert next_command(unsure, TYPED) == f"To be surer: `{TYPED}`."


def test_the_proposed_blocks_are_the_fewest_whose_interval_leaves_out_no_difference() -> None:
    """A half interval shrinks as one over the root of the blocks."""
    for ratios in (
        (1.2, 0.98, 1.1, 1.02, 1.14),
        (1.3, 0.9, 1.1, 1.05),
        (1.4, 0.85, 1.2, 0.97, 1.1),
    ):
        cells = measured(*ratios).cells
        row, blocks = cells.set_index("cell_id").loc["cell"], len(ratios)
        half, difference = (
            log(row[c] / by) for c, by in (("speedup_high", row["speedup"]), ("speedup", 1))
        )
        wanted = int(next_command(cells, TYPED).split("blocks=")[1].split("`")[0])
        assert wanted >= blocks + 3
        assert half * sqrt(blocks / wanted) <= difference
        assert wanted == blocks + 3 or half * sqrt(blocks / (wanted - 1)) > difference


def test_nothing_is_said_where_the_fastest_cell_is_known() -> None:
    assert next_command(measured(1.5, 1.52, 1.49, 1.5, 1.51).cells, TYPED) == ""


def test_where_nothing_beat_the_baseline_no_command_is_proposed() -> None:
    assert next_command(measured(0.5, 0.52, 0.49, 0.5, 0.51).cells, TYPED) == ""


def test_a_screening_run_that_is_not_far_away_is_not_decided() -> None:
    near, far = (
        next_command(measured(ratio, purpose=SCREENING).cells, TYPED) for ratio in (2.1, 0.1)
    )
    assert near == f"To be surer: `{TYPED}`."
    assert far == ""
