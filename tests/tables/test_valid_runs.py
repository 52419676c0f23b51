"""Which runs count, of which code, on which device, and what a table must hold."""

from typing import Any

import pytest
from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.results.record import CHOOSING, SCREENING
from vitsweep.tables import valid_runs as of
from vitsweep.tables.valid_runs import checked, final_status, keyed, one_device, one_device_each

NAN = float("nan")


def runs(*rows: dict[str, Any]) -> DataFrame:
    """Runs in order of time, of one cell in one sweep unless they say otherwise."""
    known = {
        "cell_id": "a",
        "status": "measured",
        "sweep": "s",
        "images_per_second": 100.0,
        "device": "cpu",
    }
    return DataFrame(
        [
            known | {"block": f"b{n}", "started_at": f"2026-01-01T{n:02}"} | row
            for n, row in enumerate(rows)
        ]
    )


def test_the_status_of_a_cell_is_that_of_its_latest_run_unless_one_was_measured() -> None:
    for ends, wanted in (
        (["measured", "killed"], "measured"),
        (["killed", "measured", "failed"], "measured"),
        (["measured", "wrong"], "wrong"),
        (["measured", "diverged"], "diverged"),
        (["wrong", "measured"], "measured"),
        (["wrong", "killed"], "killed"),
        (["failed", "out_of_memory"], "out_of_memory"),
    ):
        found = runs(*[{"status": end, "reason": str(n)} for n, end in enumerate(ends)])
        [row] = final_status(found).to_dict("records")
        assert row["status"] == wanted
        assert ends[int(row["reason"])] == wanted
        assert final_status(found[::-1])["status"].tolist() == [wanted], "whatever their order"
        kept = of.valid_runs(found)["block"].tolist()
        assert kept == ([f"b{ends.index('measured')}"] if wanted == "measured" else [])
    two = runs(
        {"cell_id": "b"}, {"cell_id": "a", "status": "failed"}, {"cell_id": "b", "status": "killed"}
    )
    assert final_status(two)[["cell_id", "status"]].to_numpy().tolist() == [
        ["a", "failed"],
        ["b", "measured"],
    ]
    assert final_status(two.assign(cell_id=[None, "a", None]))["cell_id"].tolist() == ["a"]


def test_screening_runs_and_other_devices_do_not_count() -> None:
    found = runs({"purpose": SCREENING}, {"purpose": CHOOSING}, {"purpose": ""}, {"purpose": None})
    assert of.is_screening(found).tolist() == [True, True, False, False]
    assert of.is_screening(found.drop(columns="purpose")).tolist() == [False] * 4
    moved = runs({"device": "V100"}, {"device": None}, {"device": "A100"})
    assert of.valid_runs(moved)["block"].tolist() == ["b1", "b2"]
    assert of.valid_runs(moved.drop(columns="device"))["block"].tolist() == ["b0", "b1", "b2"]


def test_runs_of_the_newest_code_count() -> None:
    first, second = ({"code_hash": "x", "torch": "2.1.0"}, {"code_hash": "y", "torch": "2.1.0"})
    other = [first | {"cell_id": "b"}, second | {"torch": "2.2.0", "sweep": "t"}]
    found = runs(first, second, second | {"torch": "2.1.1"}, *other)
    assert of.newest_code(found)["block"].tolist() == ["b1", "b2", "b3", "b4"]
    assert of._code(found).tolist()[:3] == ["x torch 2.1", "y torch 2.1", "y torch 2.1"]
    newer = runs({"code_hash": "x", "torch": "2.1.0"}, {"code_hash": "x", "torch": "2.2.0"})
    assert of.newest_code(newer)["block"].tolist() == ["b1"]
    assert of.newest_code(newer[["cell_id", "status"]]).index.tolist() == [0, 1]
    table = keyed(of.checked_runs(found), {"a": "b", "b": None})
    row = table.rows[table.rows["cell_id"] == "a"].iloc[0]
    assert (row["older"], row["baseline_cell_id"], row["others"]) == (1, "b", 0)


def test_a_table_is_checked_before_it_is_read() -> None:
    table = runs(
        {},
        {"images_per_second": -1.0},
        {"images_per_second": float("inf")},
        {"images_per_second": "7"},
    )
    assert checked(table)["images_per_second"].tolist()[::3] == [100, 7]
    assert checked(table)["images_per_second"].isna().tolist() == [False, True, True, False]
    assert checked(runs({"images_per_second": 0.0}))["images_per_second"].isna().all()
    assert checked(runs({"loss_last": 0.0}))["loss_last"].tolist() == [0]
    assert "peak_rss_gib" in checked(table, (), ("peak_rss_gib",))
    assert checked(DataFrame(), ("cell_id",)).columns.tolist() == ["cell_id"]
    for wrong, column in (
        (runs({"images_per_second": "fast"}), "images_per_second"),
        (runs({"images_per_second": 1j}), "images_per_second"),
        (runs({"cell_id": None}, {}), "cell_id"),
        (runs({}).drop(columns="status"), "status"),
        (runs({}, {"block": None}), "block"),
    ):
        with pytest.raises(VitsweepError, match=f"^Column `{column}`"):
            of.checked_runs(wrong)
    twice = runs({"block": "x"}, {"block": "x"})
    with pytest.raises(VitsweepError, match="images_per_second"):
        of.checked_cells(twice.assign(images_per_second=[1.0, 2.0]))
    assert len(of.checked_cells(twice)) == 1
    assert len(of.checked_cells(twice.assign(sweep=["s", "t"], images_per_second=[1.0, 2.0]))) == 2
    again = runs({}, {}).assign(run_id=["r", "r"], started_at="2026", block="x")
    assert len(of.checked_runs(again)) == 1
    assert len(of.checked_runs(again.assign(run_id=["r", "q"]))) == 2
    assert len(of.checked_runs(again.assign(run_id=["r", None]))) == 2


def test_runs_are_read_oldest_first() -> None:
    found = runs({}, {}, {})
    assert of.in_order(found[::-1]).index.tolist() == [0, 1, 2]
    unknown = found.assign(started_at=["2026-02", None, "2026-01"])
    assert of.in_order(unknown).index.tolist() == [1, 2, 0]
    assert of.in_order(found.drop(columns="started_at")[::-1]).index.tolist() == [2, 1, 0]


def test_rows_of_several_devices_are_not_compared() -> None:
    two = runs({"device": "V100"}, {"cell_id": "b", "device": "A100"})
    assert one_device(two[:1]) is not None
    assert len(one_device(two.assign(status=["measured", "failed"]))) == 2
    assert len(one_device(two.drop(columns="device"))) == 2
    with pytest.raises(VitsweepError, match=r"V100.*A100"):
        one_device(two)
    based = two.assign(baseline_cell_id="b")
    with pytest.raises(VitsweepError, match=r"A100.*V100|V100.*A100"):
        one_device_each(based)
    assert len(one_device_each(based.assign(status=["failed", "measured"]))) == 2
    assert len(one_device_each(based.assign(sweep=["s", "t"]))) == 2
    assert len(one_device_each(based.assign(device="V100"))) == 2


def test_columns_as_numbers_and_texts() -> None:
    table = DataFrame(
        {
            "peak_allocated_gib": [1.0, NAN],
            "peak_rss_gib": [3.0, 4.0],
            "x": ["7", "y"],
            "d": ["V", None],
        }
    )
    assert of.numbers(table, "peak_gib").tolist() == [1, 4]
    assert of.numbers(table, "x").fillna(-1).tolist() == [7, -1]
    assert of.numbers(table, "no").isna().all()
    assert (of.text(table, "d").tolist(), of.text(table, "no").tolist()) == (["V", ""], ["", ""])
