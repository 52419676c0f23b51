"""What went how far, from cells with known ends."""

import pytest

from tests.builders import run, table
from tests.tables.test_replicates import with_commands
from vitsweep.errors import VitsweepError
from vitsweep.extras.limit.shown import limit_key
from vitsweep.extras.limit.table import limit_answer, limit_names, limits, limits_text, named
from vitsweep.tables.cells import cells
from vitsweep.tables.sentences import say

KEY = "model.depth"


def probe(sharding, depth, status="measured", **spec):
    return run(
        f"{sharding}{depth}{spec.get('world_size', 2)}",
        status=status,
        sharding=sharding,
        metrics={"num_parameters": 1000.0 * depth, "peak_rss_gib": depth / 64},
        **{KEY: depth} | spec,
    )


@pytest.fixture
def found():
    runs = table(
        *[probe("ddp", d) for d in (8, 16, 18)],
        *[probe("ddp", d, "out_of_memory") for d in (32, 20)],
        *[probe("fsdp", d) for d in (16, 32)],
        probe("fsdp", 64, "failed", reason="KeyError: x"),
        probe("zero1", 4, "out_of_memory"),
    )
    return limits(cells(runs, {}), KEY)


def test_a_row_says_what_fits_and_what_does_not(found):
    rows = found.set_index("sharding")
    assert rows["fits"].to_dict() == {"fsdp": 32, "ddp": 18, "zero1": 0}
    assert rows["fails_at"].dropna().to_dict() == {"ddp": 20, "zero1": 4}
    assert rows.loc["ddp", "num_parameters"] == 18_000
    assert rows.loc["fsdp", "peak_gib"] == 0.5
    assert rows.loc["ddp", "cell_id"] == "ddp182"
    assert rows.loc["fsdp", "ended"] == "64 failed: KeyError: x"
    assert rows.loc["ddp", "ended"] == ""


@pytest.mark.smoke
def test_the_table_is_read_with_its_units_and_the_answer_names_both_ends(found):
    text = limits_text(found, KEY)
    assert text["largest model.depth"].tolist() == ["32", "18", "none"]
    assert text["parameters"].tolist() == ["32,000", "18,000", ""]
    assert limit_answer(found, KEY) == say("limit", key=KEY, found="32 with fsdp, 18 with ddp")


def test_worlds_have_limits_of_their_own():
    wide = {"world_size": 4, "ranks_per_node": 4}
    runs = table(probe("fsdp", 8), probe("fsdp", 16, **wide))
    found = limits(cells(runs, {}), KEY).set_index("world_size")["fits"]
    assert found.to_dict() == {4: 16, 2: 8}


def test_the_key_is_that_of_the_latest_command():
    assert limit_key(with_commands([{"limit": {"key": KEY}}, {"limit": {"key": None}}])) == ""
    assert limit_key(with_commands([{"question": ""}, {"limit": {"key": KEY}}])) == KEY
    assert limit_key(with_commands([])) == ""


def test_limits_are_of_numbers_and_name_what_was_searched():
    runs = table(probe("ddp", 8), probe("ddp", 16, "out_of_memory"))
    known = cells(runs, {})
    alone = limits(known, KEY)
    assert (alone["fits"].tolist(), alone["fails_at"].tolist(), limit_names(alone)) == (
        [8],
        [16],
        [""],
    )
    assert limit_answer(alone, KEY) == say("limit", key=KEY, found="8")
    assert limits(known, "no.such").empty
    assert limits(known[:0], KEY).empty
    none = limits(cells(table(probe("ddp", 4, "out_of_memory")), {}), KEY)
    assert limit_answer(none, KEY) == say("limit", key=KEY, found="none")
    with pytest.raises(VitsweepError, match=KEY):
        limits(known.assign(**{KEY: ["8", "deep"]}), KEY)
    several = limits(cells(table(probe("ddp", 1000), probe("fsdp", 2000, world_size=4)), {}), KEY)
    assert (
        limit_names(several) == ["4 ranks · fsdp", "2 ranks · ddp"]
        or len(limit_names(several)) == 2
    )
    assert "2,000 " in limit_answer(several, KEY)
    assert named(several) == [c for c in several if c in ("sharding", "world_size")]
