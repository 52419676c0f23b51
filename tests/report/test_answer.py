"""The sentence at the end of a command, and what it says to type next."""

import re
from functools import cache
from math import exp, log, nan, sqrt
from typing import Any

import numpy as np
from pandas import DataFrame

from tests.builders import from_runs, run, table
from tests.said import opening
from vitsweep.report.answer import MOST, answers, next_command, question, winners
from vitsweep.results.record import SCREENING
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import Claim
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


def test_noise_that_hides_everything_is_named() -> None:
    noisy = measured(0.7, 1.5, 0.9, 1.4, 0.8)
    [answer] = answers(noisy)
    assert answer.startswith(opening("none_shown", base="the baseline") + "O1 ")
    assert answer.endswith(f"{Claim.no_difference_shown}, {say('noisy', noise=34)}.")
    assert next_command(noisy.cells, TYPED) == "", "more than 60 blocks would be needed"


def test_the_noise_that_is_named_is_that_of_one_block_though_blocks_resemble_each_other() -> None:
    ratios = 1 + 0.3 * np.sin(np.arange(16) / 2.5)  # so alike that the interval is 2 times as wide
    noise = np.log(ratios).std(ddof=1)
    for any_look in (False, True):
        [answer] = answers(measured(*ratios, any_look=any_look))
        assert answer.endswith(f"{Claim.no_difference_shown}, {say('noisy', noise=100 * noise)}.")


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
    assert opening("noisy") not in answer


def test_what_is_unsure_gets_as_many_blocks_as_would_show_it() -> None:
    assert next_command(measured(1.2, 0.98, 1.1, 1.02, 1.14).cells, TYPED) == (
        f"To be surer: `{TYPED} measurement.blocks=8`."
    )
    unsure = measured(1.2, 0.95, 1.1, 1.02, 1.14, any_look=True).cells
    assert next_command(unsure, TYPED) == f"To be surer: `{TYPED}`."
    retried = "python -m vitsweep retry s --set measurement.timeout_min=2"
    assert next_command(unsure, retried) == "", "it adds no blocks"


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


def test_nothing_is_reported_where_the_fastest_cell_is_known() -> None:
    assert next_command(measured(1.5, 1.52, 1.49, 1.5, 1.51).cells, TYPED) == ""


def test_where_nothing_beat_the_baseline_no_command_is_proposed() -> None:
    assert next_command(measured(0.5, 0.52, 0.49, 0.5, 0.51).cells, TYPED) == ""


def test_a_screening_run_that_is_not_far_away_is_not_decided() -> None:
    near, far = (
        next_command(measured(ratio, purpose=SCREENING).cells, TYPED) for ratio in (2.1, 0.1)
    )
    assert near == f"To be surer: `{TYPED}`."
    assert far == ""


def proposed(*rows: dict[str, Any], typed: str = TYPED) -> int | None:
    """The blocks that the next command asks for; 0 where it is the same, None where there is none."""
    known = {
        "status": "measured",
        "claim": "no difference shown",
        "num_pairs": 5,
        "any_look": False,
    }
    table = [known | {"cell_id": f"c{n}", "speedup_low": 0.9} | row for n, row in enumerate(rows)]
    text = next_command(DataFrame(table), typed)
    assert not text or TYPED in text
    assert text.count("measurement.blocks=") <= 1
    return int(text.split("blocks=")[1].split("`")[0]) if "blocks=" in text else 0 if text else None


def test_the_next_command_follows_from_the_best_cell() -> None:
    unsure = {"speedup": 1.1, "speedup_high": 1.3}  # 5 (log(1.3 / 1.1) / log 1.1)^2 = 15.4
    slower = {"speedup": 0.5, "speedup_low": 0.4, "speedup_high": 0.6, "claim": "slower"}
    faster = {"claim": "faster", "speedup": 1.1, "speedup_high": 1.15}
    screened = {"claim": "screened", "num_pairs": 0, "speedup_high": nan}
    of_baseline = {"claim": "baseline", "speedup": 1.0, "speedup_low": 1.0, "speedup_high": 1.0}
    for wanted, rows in (
        (16, [unsure]),
        (16, [unsure, slower, of_baseline]),
        (None, [slower, of_baseline]),
        (None, [unsure | {"status": "failed"}]),
        (None, [faster | {"speedup_low": 1.01}, unsure]),
        (8, [faster | {"speedup_low": 1.009}, unsure]),
        (8, [faster | {"claim": "probably faster", "speedup_low": 1.05}]),
        (None, [faster | {"speedup_low": 1.05}, faster | {"speedup_low": 1.001}]),
        (None, [unsure, {"claim": "missing blocks", "speedup": 1.2, "speedup_high": 1.3}]),
        (16, [unsure, {"claim": "missing blocks", "speedup": 1.0, "speedup_high": 1.3}]),
        (8, [unsure, {"speedup": 1.3, "speedup_high": 1.5}]),
        (11, [{"speedup": 1.001, "speedup_high": 1.03}]),  # a difference of 2 % at least
        (10, [{"speedup": 1.2, "speedup_high": nan, "claim": "too few blocks"}]),
        (5, [{"speedup": 1.2, "speedup_high": nan, "claim": "too few blocks", "num_pairs": 2}]),
        (55, [{"speedup": exp(0.1), "speedup_high": exp(0.29), "num_pairs": 15}]),
        (None, [{"speedup": exp(0.1), "speedup_high": exp(0.31), "num_pairs": 15}]),
        (0, [unsure | {"any_look": True}]),
        (16, [unsure | {"any_look": None}]),
        (0, [screened | {"speedup": 0.51}]),
        (None, [screened | {"speedup": 0.5}]),
        (16, [unsure, screened | {"speedup": 3.0}]),
    ):
        assert proposed(*rows) == wanted, rows
    assert proposed(unsure, typed=f"{TYPED} measurement.blocks=3") == 16


def test_a_question_names_the_few_settings_that_vary() -> None:
    names = ["precision", "sharding", "optimizer", "classifier", "memory", "attention"]
    changes = {"precision": "O1", "sharding": "fsdp", "optimizer": "lamb", "classifier": "pooled"}
    changes |= {"memory": "offload", "attention": "math"}
    for most, named in ((0, 0), (1, 1), (3, 3), (4, 4), (5, 0)):
        runs = table(run("a"), run("b", **{name: changes[name] for name in names[:most]}))
        asked = question(runs)
        assert [name in asked for name in names] == [n < named for n in range(6)]
        assert ("combination" in asked) == (most > 1)
    two = table(run("a"), run("b", sharding="fsdp", precision="O1"))
    assert (
        "sharding" in question(two, "precision"),
        "precision" in question(two, "precision"),
    ) == (True, False)


@cache
def settings_of(number: int, devices: int = 1) -> SweepTables:
    """Baselines of as many resolutions, each beside a cell that is 1.5 times as fast."""
    records = [
        run(f"{cell}{n}", f"b{block}", speed * (100 + block), minute=block, resolution_px=32 + n,
            precision=name, environment={"device": f"D{n % devices}"})
        for n in range(number) for block in range(3)
        for cell, name, speed in (("base", "fp32", 1.0), ("cell", "O1", 1.5))
    ]  # fmt: skip
    return from_runs(table(*records), {r.cell_id: f"base{r.cell_id[4:]}" for r in records})


def test_eight_settings_have_their_sentences_and_more_have_a_table() -> None:
    for number in (1, 2, MOST, MOST + 1):
        tables = settings_of(number)
        said, (sentence, rows) = answers(tables), winners(tables)
        assert len(said) == min(number, MOST)
        assert (said[-1] == sentence) == (number > MOST)
        assert len(rows) == (number if number > 1 else 0)
        assert bool(sentence) == (number > 1)
    assert rows["setting"].tolist() == [f"{32 + n} px" for n in range(MOST + 1)]
    assert set(rows["fastest shown"]) == {"O1"}
    assert set(rows["speedup"]) == {"1.50x [1.50, 1.50]"}
    on_two = winners(settings_of(2, devices=2))[1]
    assert [text.rpartition(" · ")[2] for text in on_two["setting"]] == ["D0", "D1"]
    one, other = answers(settings_of(2, devices=2))
    assert ("D0" in one, "D1" in one, "D0" in other) == (True, False, False)
    assert "D0" not in answers(settings_of(1))[0]


def test_an_interval_that_no_family_has_is_the_cells_own() -> None:
    """Three blocks that were looked at tell nothing at the level of many cells."""
    records = [
        run(
            name,
            f"b{n}",
            speed * (100 + n),
            minute=n,
            precision=name,
            environment={"any_look": True},
        )
        for n in range(3)
        for name, speed in [("base", 1.0)] + [(f"o{m}", 1.2 + m / 100 + n / 1e4) for m in range(9)]
    ]
    tables = from_runs(table(*records), {r.cell_id: "base" for r in records})
    assert tables.cells["claim_low"].isna().sum() >= 9
    [answer] = answers(tables)
    assert not re.search(r"corrected|\b10 cells", answer)


def test_the_fastest_is_named_otherwise_where_an_estimate_is_higher() -> None:
    def opened(**cells: tuple[float, ...]) -> str:
        records = [
            run(name, f"b{n}", 100 * ratio, minute=n, precision=name)
            for name, ratios in {"base": (1.0,) * 5, **cells}.items() for n, ratio in enumerate(ratios)
        ]  # fmt: skip
        [answer] = answers(from_runs(table(*records), {r.cell_id: "base" for r in records}))
        return answer.partition(":")[0]

    sure, noisy = (1.301, 1.299, 1.302, 1.298, 1.3), (1.0, 2.6, 1.1, 2.5, 1.4)
    alone, beside = opened(O1=sure), opened(O1=sure, O2=noisy)
    assert alone.startswith("O1 ")
    assert beside.startswith("O1 ")
    assert alone != beside
    assert opened(O1=sure, O2=(0.9, 1.2, 1.0, 1.1, 1.0)) == alone
