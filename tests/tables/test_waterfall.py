import math

import pytest

from tests.builders import run, table
from vitsweep.results.record import Status
from vitsweep.tables.cells import cells
from vitsweep.tables.changes import with_changes
from vitsweep.tables.interactions import interactions
from vitsweep.tables.waterfall import longest_chain, waterfall

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


def test_one_technique_alone_is_no_waterfall():
    runs = table(run("base"), run("o1", "b0", 150, **O1))
    assert waterfall(runs, BASELINES)["kind"].tolist() == ["alone"]


def test_the_longest_chain_wins():
    a, ab, b, abc = map(frozenset, ("a", "ab", "b", "abc"))
    assert longest_chain([b, abc, ab, a, frozenset()])[2:] == [ab, abc]
    assert len(longest_chain([b, abc, ab, a, frozenset()])) == 4
    assert longest_chain([]) == []


def test_interaction_is_what_both_bring_beyond_the_product(runs):
    pair = interactions(runs, BASELINES).iloc[0]
    assert (pair["first"], pair["second"]) == ("precision=O1", "sharding=fsdp")
    assert pair["expected"] == pytest.approx(1.35)
    assert pair["speedup_both"] == pytest.approx(1.6)
    assert pair["interaction"] == pytest.approx(1.6 / 1.35)
    assert pair["interaction_low"] == pytest.approx(1.6 / 1.35)
    assert pair["claim"] == "help each other"


def test_an_interaction_inside_the_noise_is_not_claimed():
    noise = [1.0, 1.05, 0.96]
    runs = table(
        *[run("base", f"b{i}", 100) for i in range(3)],
        *[run("o1", f"b{i}", 150 * n, **O1) for i, n in enumerate(noise)],
        *[run("fsdp", f"b{i}", 90, **FSDP) for i in range(3)],
        *[run("o1_fsdp", f"b{i}", 135, **O1, **FSDP) for i in range(3)],
    )
    assert interactions(runs, BASELINES)["claim"].tolist() == ["no interaction shown"]


def test_a_failed_half_gives_no_interaction():
    runs = table(
        *[
            run(c, f"b{i}", s, **k)
            for c, (s, k) in SETTINGS.items()
            if c in ("base", "o1", "o1_fsdp")
            for i in range(3)
        ],
        run("fsdp", "b0", status=Status.out_of_memory, reason="no room", **FSDP),
    )
    pair = interactions(runs, BASELINES).iloc[0]
    assert math.isnan(pair["interaction"])
    assert pair["claim"] == ""


def test_no_pairs_give_an_empty_table():
    assert interactions(table(run("base"), run("o1", **O1)), BASELINES).empty
