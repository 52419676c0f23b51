"""Runs of different code are never taken together."""

from dataclasses import replace

import pytest
from pandas import DataFrame

from tests.builders import run, table
from vitsweep.results.record import SCREENING, RunRecord, Status
from vitsweep.tables.cells import cells
from vitsweep.tables.sentences import say
from vitsweep.tables.speedup import speedup_over
from vitsweep.tables.valid_runs import newest_code

BASELINES = {"base": "base", "fast": "base", "new": "base"}


def measured(cell: str, code: str, *speeds: float, first: int = 0) -> list[RunRecord]:
    """Runs of a cell by one code, in blocks that follow one another in time."""
    return [
        run(cell, f"b{n}", speed, minute=n, environment={"code_hash": code})
        for n, speed in enumerate(speeds, start=first)
    ]


def row(found: DataFrame, cell: str) -> dict[str, object]:
    [values] = found[found["cell_id"] == cell].to_dict("records")
    return {str(k): v for k, v in values.items()}


def test_after_an_edit_the_new_runs_alone_count() -> None:
    before = [*measured("base", "B", 100, 100, 100), *measured("fast", "old", 300, 300, 300)]
    edited = [
        *measured("base", "B", 100, 101, 102, first=3),
        *measured("fast", "new", 110, 111, 112, first=3),
    ]
    found = cells(table(*before, *edited), BASELINES)
    fast = row(found, "fast")
    assert fast["speedup"] == pytest.approx(1.1, abs=0.01)
    assert (fast["blocks"], fast["num_pairs"]) == (3, 3)
    assert fast["speedup_note"] == say("other_code", blocks="3 blocks", whose="it")
    assert row(found, "base")["blocks"] == 6, "its own code is the same"
    assert len(found) == 2


def test_edited_code_that_fails_leaves_no_old_number() -> None:
    failed = run("fast", "b3", status=Status.wrong, minute=9, environment={"code_hash": "new"})
    runs = [*measured("base", "B", 100), *measured("fast", "old", 300), failed]
    fast = row(cells(table(*runs), BASELINES), "fast")
    assert fast["status"] == Status.wrong
    assert fast["images_per_second"] != fast["images_per_second"]


def test_a_cell_that_was_not_measured_anew_keeps_the_baseline_of_its_own_blocks() -> None:
    """The package was edited, and a new cell measured: the other one has its old baseline still."""
    old = [*measured("base", "B1", 100, 100, 100), *measured("fast", "F1", 150, 150, 150)]
    new = [
        *measured("base", "B2", 200, 200, 200, first=3),
        *measured("new", "N2", 400, 400, 400, first=3),
    ]
    found = cells(table(*old, *new), BASELINES)
    assert sorted(found["cell_id"]) == ["base", "fast", "new"]
    fast, other, base = (row(found, cell) for cell in ("fast", "new", "base"))
    assert (fast["speedup"], other["speedup"]) == (pytest.approx(1.5), pytest.approx(2.0))
    assert fast["images_per_second"] == pytest.approx(150), "not scaled to the new baseline"
    assert base["images_per_second"] == pytest.approx(200)
    assert fast["speedup_note"].startswith(say("earlier_baseline"))
    assert "0.750 times" in fast["speedup_note"], "the baseline that is shown has newer code"
    assert fast["baseline_cell_id"] == "base"
    assert {fast["family_size"], other["family_size"]} == {1}, "no claim spans two codes"


def test_a_ratio_is_of_the_newest_code_of_the_baseline_that_shares_a_block() -> None:
    runs = [
        *measured("fast", "F", 150, 150, 150, 220, 220, 220),
        *measured("base", "B1", 100, 100, 100),
        *measured("base", "B2", 200, 200, 200, first=3),
    ]
    found = row(speedup_over(table(*runs), BASELINES), "fast")
    assert (found["speedup"], found["num_blocks"]) == (pytest.approx(1.1), 3)
    assert found["speedup_note"] == say("other_code", blocks="3 blocks", whose="its baseline")


def test_a_sweep_whose_code_changed_between_two_commands_has_a_ratio_of_one_code() -> None:
    """Three blocks before an edit of the baseline's code, two after it: the old three do not count.

    The variant's code is the same. Taken together the ratio would be about 1.2, true of neither code. A run
    after the edit decides nothing where blocks were measured in full.
    """
    before = [*measured("fast", "F", 130, 131, 129), *measured("base", "B1", 100, 100, 100)]
    after = [
        *measured("fast", "F", 130, 131, first=3), *measured("base", "B2", 120, 120, first=3)
    ]  # fmt: skip
    found = row(cells(table(*before, *after), BASELINES), "fast")
    assert found["speedup"] == pytest.approx(130.5 / 120, abs=0.001)
    assert (found["num_pairs"], found["claim"]) == (2, "too few blocks")
    base_level = row(cells(table(*before, *after), BASELINES), "base")["images_per_second"]
    assert found["images_per_second"] / base_level == pytest.approx(130.5 / 120, abs=0.001)
    assert found["images_per_second"] == pytest.approx(130.25, abs=0.01), (
        "as in the median block, 3"
    )
    assert "3 blocks" in str(found["speedup_note"])
    looked = [
        run(r.cell_id, "screening", r.metrics["images_per_second"], minute=9, validity={"purpose": SCREENING},
            environment={"code_hash": r.environment["code_hash"]})
        for r in after[::2]
    ]  # fmt: skip
    by_blocks = row(cells(table(*before, *looked), BASELINES), "fast")
    assert by_blocks["num_pairs"] == 3
    assert by_blocks["speedup_note"].startswith(say("earlier_baseline"))
    assert by_blocks["speedup"] == pytest.approx(1.3, abs=0.01)


def test_two_sweeps_with_blocks_of_one_name_are_distinguished_by_code_too() -> None:
    """Blocks are called alike in every sweep; what one sweep edited says nothing of the other."""
    old = [*measured("fast", "F", 150, 150, 150), *measured("base", "B1", 100, 100, 100)]
    edited = measured("base", "B2", 200, 200, 200, first=3)
    other = [
        replace(r, sweep="other")
        for r in (*measured("fast", "F", 300, 300, 300), *measured("base", "B2", 100, 100, 100))
    ]
    found = cells(table(*old, *edited, *other), BASELINES).set_index(["cell_id", "sweep"])
    assert found.loc[("fast", "sample"), "speedup"] == pytest.approx(1.5)
    assert found.loc[("fast", "sample"), "speedup_note"].startswith(say("earlier_baseline"))
    assert found.loc[("fast", "other"), "speedup"] == pytest.approx(3.0)
    assert found.loc[("fast", "other"), "speedup_note"] == ""


def test_records_without_a_hash_are_a_code_of_their_own() -> None:
    old = [run("fast", f"b{n}", 300, minute=n) for n in range(3)]
    new = measured("fast", "F", 100, first=5)
    assert list(newest_code(table(*old, *new))["images_per_second"]) == [100]
    assert len(newest_code(table(*old))) == 3


def test_blocks_of_an_earlier_torch_are_not_pooled_with_those_of_a_later_one() -> None:
    runs = [
        run(cell, f"b{n}", speed * (1 + n / 99), minute=n, environment={"torch": version})
        for n, version in enumerate(("2.13.0", "2.13.0", "2.14.0", "2.14.1", "2.14.1"))
        for cell, speed in (("base", 100), ("fast", 150 if version == "2.13.0" else 110))
    ]
    fast = row(cells(table(*runs), BASELINES), "fast")
    assert (fast["num_pairs"], fast["speedup"]) == (3, pytest.approx(1.1))
    assert fast["speedup_note"] == say("other_code", blocks="2 blocks", whose="it")
