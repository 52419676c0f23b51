"""The sentence at the end of a command, and what it says to type next."""

import re
from functools import cache
from math import log
from typing import Any

import numpy as np
from pandas import DataFrame

from tests.builders import from_runs, run, table
from tests.said import opening
from vitsweep.report.answer import MOST, answers, best_cells, next_command, question, winners
from vitsweep.results.record import SCREENING
from vitsweep.tables.replicates import replicates
from vitsweep.tables.sentences import say
from vitsweep.tables.stats import Claim, any_look_half_width, minimum_detectable_effect
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
    assert answer.startswith(opening("none_shown", base="the baseline") + "; O1 ")
    assert (
        f"{Claim.no_difference_shown}, {say('noisy', noise=34, unit='block')}; its img/s are "
        in answer
    )
    assert next_command(noisy.cells, TYPED) == say("undecidable", difference=2, most="60 blocks")


def test_the_noise_that_is_named_is_that_of_one_block_though_blocks_resemble_each_other() -> None:
    ratios = 1 + 0.3 * np.sin(np.arange(16) / 2.5)  # so alike that the interval is 2 times as wide
    noise = np.log(ratios).std(ddof=1)
    for any_look in (False, True):
        [answer] = answers(measured(*ratios, any_look=any_look))
        told = say("noisy", noise=100 * noise, unit="block")
        assert answer.endswith(f"{Claim.no_difference_shown}, {told}.")


def test_a_faster_cell_that_was_never_compared_is_named_after_the_fastest_shown() -> None:
    both = [
        run(c, f"b{n}", v + n, minute=n)
        for n in range(5)
        for c, v in (("base", 100), ("cell", 110))
    ]
    alone = [run("other", f"x{n}", 200 + n, minute=9 + n, precision="O1") for n in range(5)]
    first, second = answers(
        from_runs(table(*both, *alone), dict.fromkeys(("base", "cell", "other"), "base"))
    )
    assert {"202", "O1"} <= {*second.replace(",", "").split()}
    assert opening("no_speedup") in second
    assert "1.10x" in first


def test_a_small_noise_is_a_result() -> None:
    [answer] = answers(measured(1.01, 0.99, 1.0, 1.01, 0.985))
    assert answer.startswith(opening("none_shown"))
    assert opening("noisy") not in answer


def test_what_is_undecided_gets_the_blocks_that_show_2_percent_whatever_the_estimates_are() -> None:
    noise = np.array([0.024, -0.008, -0.022, 0.004, 0.002])
    sd = noise.std(ddof=1)
    for estimate in (-0.002, 0.0, 0.016):
        text = next_command(measured(*np.exp(estimate + noise)).cells, TYPED)
        wanted = int(text.split("blocks=")[1].split("`")[0])
        assert f"`{TYPED} measurement.blocks={wanted}`" in text
        assert minimum_detectable_effect(wanted, 1, sd) <= 0.02
        assert minimum_detectable_effect(wanted - 1, 1, sd) > 0.02
    unsure = measured(*np.exp(noise), any_look=True, run_seconds=30.0, launcher="local").cells
    minutes = int(
        next_command(unsure, f"{TYPED} sweep.minutes=1").split("sweep.minutes=")[1].split("`")[0]
    )
    # a block is two runs of half a minute
    assert any_look_half_width(sd, 5 + minutes) < log(1.02) < any_look_half_width(sd, 5)
    retried = "python -m vitsweep retry s --set measurement.timeout_min=2"
    assert next_command(unsure, retried) == "", "it adds no blocks"


def test_where_seeds_are_the_repetitions_more_seeds_are_named() -> None:
    records = [
        run(f"{cell}{seed}", f"s{seed}b{block}", 100 * speed, minute=block, precision=cell, seed=seed)
        for seed, other in ((3, 1.012), (4, 0.99), (7, 1.0))
        for block in range(3) for cell, speed in (("base", 1.0), ("O1", other))
    ]  # fmt: skip
    tables = from_runs(table(*records), {r.cell_id: f"base{r.cell_id[-1]}" for r in records})
    settings = replicates(tables.cells, "seed")
    typed = "python -m vitsweep -m seed=3,4,7 precision=fp32,O1 sweep.replicate=seed"
    text = next_command(settings, typed, tables.cells)
    assert typed.replace(" seed=3,4,7", "") + " seed=3,4,7,8," in text
    assert "measurement.blocks" not in text
    more = text.split(" seed=")[1].split("`")[0]
    assert more.count(",") > 2, "more than three"
    for seeds in ("'seed=range(0, 3)'", "'seed=3, 4, 7'", "'+seed=3, 4, 7'"):
        spaced = next_command(settings, typed.replace("seed=3,4,7", seeds), tables.cells)
        assert spaced == text


def test_nothing_is_reported_where_the_fastest_cell_is_known() -> None:
    assert next_command(measured(1.5, 1.52, 1.49, 1.5, 1.51).cells, TYPED) == ""


def test_where_nothing_beat_the_baseline_no_command_is_proposed() -> None:
    assert next_command(measured(0.5, 0.52, 0.49, 0.5, 0.51).cells, TYPED) == ""


def test_a_screening_run_that_is_not_far_away_is_not_decided() -> None:
    near, far = (
        next_command(measured(ratio, purpose=SCREENING).cells, TYPED) for ratio in (2.1, 0.1)
    )
    assert near == say("surer", command=TYPED, minutes="")
    assert far == ""


def proposed(*rows: dict[str, Any], typed: str = TYPED) -> int | None:
    """The blocks that the next command asks for; 0 where it is the same, None where there is none."""
    known = {
        "status": "measured",
        "claim": "no difference shown",
        "num_pairs": 5,
        "any_look": False,
        "baseline_cell_id": "base",
    }
    table = [known | {"cell_id": f"c{n}", "speedup_low": 0.9} | row for n, row in enumerate(rows)]
    text = next_command(DataFrame(table), typed)
    assert not text or TYPED in text
    assert text.count("measurement.blocks=") <= 1
    return int(text.split("blocks=")[1].split("`")[0]) if "blocks=" in text else 0 if text else None


def test_the_next_command_follows_from_what_is_undecided() -> None:
    unsure = {"speedup": 1.01, "block_noise": 0.015, "family_size": 4}
    slower = {"speedup": 0.5, "claim": "slower", "block_noise": 1e-9, "family_size": 4}
    faster = {"speedup": 1.1, "claim": "faster", "block_noise": 1e-9, "family_size": 4}
    of_baseline = {"claim": "baseline", "speedup": 1.0, "cell_id": "base"}
    screened = {"claim": "screened", "num_pairs": 0}
    few = {"speedup": 1.2, "claim": "too few blocks", "num_pairs": 2, "block_noise": 0.3}
    other = {"baseline_cell_id": "other"}
    wanted = proposed(unsure)
    assert wanted
    for blocks, rows in (
        (wanted, [unsure | {"speedup": 3.0}, slower, of_baseline]),
        (wanted, [unsure, unsure | {"block_noise": 1.0}, unsure | {"block_noise": 1e-9}]),
        (wanted, [unsure, screened | {"speedup": 3.0}, few]),
        (wanted, [unsure, faster | other]),
        (None, [slower, of_baseline]),
        (None, [unsure | {"status": "failed"}]),
        (None, [faster, unsure]),
        (None, [unsure | {"num_pairs": wanted}]),
        (None, [{"claim": "missing blocks", "speedup": 1.2}]),
        (5, [few]),
        (0, [few | {"any_look": True}]),
        (0, [unsure | {"any_look": True}]),
        (wanted, [unsure | {"any_look": None}]),
        (0, [screened | {"speedup": 0.51}]),
        (None, [screened | {"speedup": 0.5}]),
    ):
        assert proposed(*rows) == blocks, rows
    assert proposed(unsure, typed=f"{TYPED} measurement.blocks=3") == wanted
    assert proposed(unsure | {"family_size": 40}) > wanted


def test_a_question_names_the_few_settings_that_vary() -> None:
    names = ["precision", "sharding", "optimizer", "classifier", "memory", "attention"]
    changes = {"precision": "O1", "sharding": "fsdp", "optimizer": "lamb", "classifier": "pooled"}
    changes |= {"memory": "offload", "attention": "math"}
    for most, named in ((0, 0), (1, 1), (3, 3), (4, 4), (5, 0)):
        runs = table(run("a"), run("b", **{name: changes[name] for name in names[:most]}))
        asked = question(runs)
        assert [name in asked for name in names] == [n < named for n in range(6)]
        assert ("combination" in asked) == (most > 1)
    assert "model.depth" in question(runs, limit_key="model.depth")
    assert "fastest" not in question(runs, limit_key="model.depth")
    grid = [run(f"{p}{n}", precision=p, world_size=n) for p in ("fp32", "O1") for n in (1, 2, 4)]
    by_ranks = table(*grid).assign(baseline_cell_id=["fp321", "fp322", "fp324"] * 2)
    assert re.search("precision .* fastest, by world size, and scales best", question(by_ranks))
    assert "scale from 1 to 4 ranks" in question(by_ranks[:3])
    assert question(by_ranks[:3].assign(world_size=1, model=["a", "b", "c"])).endswith("fastest?")
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
        assert (said[0] == sentence) == (number > MOST)
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


def test_of_many_baselines_those_that_are_shown_to_be_beaten_come_first() -> None:
    sure, surer, noisy = (1.21, 1.19, 1.2), (1.51, 1.49, 1.5), (1.0, 2.6, 1.1)
    records = [
        run(f"{kind}{number}", f"b{n}", 100 * ratio, minute=n, precision=kind, resolution_px=32 + number)
        for number, ratios in enumerate((noisy, sure, surer))
        for kind, every in (("base", (1.0, 1.01, 1.0)), ("O1", ratios)) for n, ratio in enumerate(every)
    ]  # fmt: skip
    tables = from_runs(table(*records), {r.cell_id: f"base{r.cell_id[-1]}" for r in records})
    assert winners(tables)[1]["setting"].tolist() == ["34 px", "33 px", "32 px"]
    assert [" 1.5" in text for text in answers(tables)] == [True, False, False]


def test_scaling_curves_have_a_sentence_each_and_the_answer_is_data_too() -> None:
    def said(*worlds: int) -> list[str]:
        records = [
            run(f"{kind}{n}", f"b{b}", speed * n**0.7 * (1 + b / 1e3), minute=b, precision=kind, world_size=n,
                ranks_per_node=n)
            for b in range(4) for n in worlds for kind, speed in (("base", 100.0), ("O1", 150.0))
        ]  # fmt: skip
        tables = from_runs(table(*records), {r.cell_id: f"base{r.cell_id[-1]}" for r in records})
        found = best_cells(tables)
        assert {f["baseline_cell_id"]: f["cell_ids"] for f in found} == {
            f"base{n}": [f"O1{n}"] for n in worlds
        }
        assert {str(f["best"]["claim"]) for f in found} == {"faster"}
        return answers(tables)[len(worlds) :]

    curves = said(1, 2, 4)
    assert len(curves) == 2
    assert all("over 1 rank: 1.62x on 2 ranks, efficiency 0.81 [0.81, 0.81]" in c for c in curves)
    assert all("; 2.64x on 4 ranks, efficiency 0.66 [0.66, 0.66] (" in c for c in curves)
    assert all(c.endswith("(corrected for 4 efficiencies).") for c in curves)
    assert said(2) == []


def test_an_interval_that_no_family_has_yet_has_no_bracket() -> None:
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
    assert "[" not in answer
    assert "9 cells" in answer


def test_the_estimate_of_a_baseline_counts_among_the_highest() -> None:
    [answer] = answers(measured(0.5, 0.52, 0.49, 0.5, 0.51))
    assert opening("estimate", name="O1", which="the next highest") in answer
    [answer] = answers(measured(1.01, 0.99, 1.02, 1.0, 0.99))
    assert opening("estimate", name="O1", which="the highest") in answer


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
