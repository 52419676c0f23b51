"""Throughput per block, ratios within it, and least squares over blocks, worked out by hand."""

from math import exp, isnan, log, sqrt
from typing import Any

import numpy as np
import pytest
from pandas import DataFrame

from vitsweep.tables import blocks
from vitsweep.tables.blocks import log_ratios, log_throughput_per_block, share_nodes, within_blocks

NAN = float("nan")


def runs(*rows: tuple[str, str, float], **facts: Any) -> DataFrame:
    """Runs of (cell, block, log of img/s)."""
    named = [{"cell_id": c, "block": b, "images_per_second": exp(x)} for c, b, x in rows]
    return DataFrame(named).assign(sweep="s", device="cpu", status="measured", **facts)


def test_a_row_is_the_mean_log_of_a_cell_in_a_block() -> None:
    table = runs(
        ("a", "x", 1.0), ("a", "x", 3.0), ("a", "y", 5.0), ("b", "x", 7.0), ("b", "y", 8.0)
    )
    table["any_look"] = [None, True, False, None, False]
    table["nodes_used"] = ["n1", "n2", None, None, "n1"]
    table.loc[4, "images_per_second"] = 0.0
    found = log_throughput_per_block(table)
    assert found[["cell_id", "block"]].to_numpy().tolist() == [["a", "x"], ["a", "y"], ["b", "x"]]
    assert found["log_throughput"].tolist() == pytest.approx([2, 5, 7])
    assert found["any_look"].tolist() == [True, False, False]
    assert found["nodes_used"].tolist()[0] == "n1"
    for bad in (NAN, float("inf"), -1.0):
        assert len(log_throughput_per_block(table.assign(images_per_second=bad))) == 0
    bare = log_throughput_per_block(table[["cell_id", "sweep", "block", "images_per_second"]])
    assert bare["device"].tolist() == [""] * 3
    assert not bare["any_look"].any()
    apart = table.assign(device=["V", None, "V", "V", "V"])
    assert len(log_throughput_per_block(apart)) == 4


def test_a_ratio_is_within_a_block_on_one_device_and_shared_nodes() -> None:
    table = log_throughput_per_block(
        runs(("a", "x", 1.0), ("b", "x", 1.5), ("a", "y", 2.0), ("b", "y", 2.7), ("b", "z", 9.0))
    )
    found = log_ratios(table, {"b": "a", "a": "a"})
    assert found[["cell_id", "block"]].to_numpy().tolist() == [["b", "x"], ["b", "y"]]
    assert found["log_ratio"].tolist() == pytest.approx([0.5, 0.7])
    assert log_ratios(table, {"b": None}).empty
    assert log_ratios(table, {"b": "gone"}).empty
    assert len(log_ratios(table.assign(nodes_used=["n1", "n1", "n1", "n2", None]), {"b": "a"})) == 1
    assert log_ratios(table.assign(device=table["cell_id"]), {"b": "a"}).empty
    for left, right, shared in (
        ("n1", "n1", True), ("n1", "n2", False), ("n1,n2", "n2", True), ("n1", "n2,n1", True),
        ("n1,n2", "n2,n3", False), (None, "n1", True), ("n1", NAN, True),
    ):  # fmt: skip
        assert share_nodes(left, right) == shared


def test_what_was_requeued_onto_other_nodes_is_another_block() -> None:
    table = DataFrame({"sweep": "s", "device": "cpu", "block": ["x", "x", "x", "x", "y"]})
    for nodes, parts in (
        ([None] * 5, [0, 0, 0, 0, 1]),
        (["n1", "n1", "n1", None, "n9"], [0, 0, 0, 0, 1]),
        (["n1", "n2", "n1", None, "n9"], [0, 1, 0, 0, 2]),
        (["n1", "n3,n4", "n4", "n1", "n9"], [1, 0, 0, 1, 2]),
    ):
        assert blocks._blocks(table.assign(nodes_used=nodes)).tolist() == parts


BALANCED = runs(
    ("a", "x", 1.0), ("b", "x", 1.4), ("a", "y", 2.0), ("b", "y", 2.6), ("a", "z", 3.0), ("b", "z", 3.5),
)  # fmt: skip


def test_least_squares_of_two_cells_are_their_paired_ratios() -> None:
    """Ratios 0.4, 0.6 and 0.5: a difference of a cell from its block's mean is half of one."""
    found = within_blocks(BALANCED)
    assert found.cells == ["a", "b"]
    assert found.information.tolist() == [[1.5, -1.5], [-1.5, 1.5]]
    assert found.total.tolist() == pytest.approx([-0.75, 0.75])
    assert (found.num_blocks.tolist(), found.degrees, found.any_look) == ([3, 3], 2, False)
    assert found.logs[1] - found.logs[0] == pytest.approx(0.5)
    assert found.residual == pytest.approx(2 * (0.05**2 + 0.05**2))
    assert found.noise == pytest.approx(sqrt(0.01 / 2))
    assert found.rest.tolist() == [pytest.approx([0.05, -0.05, 0]), pytest.approx([-0.05, 0.05, 0])]
    weights = np.array([[-1.0, 1.0]]) / 3
    variance, degrees = found.variance_over_blocks(weights)
    assert variance[0] == pytest.approx(
        0.1**2 / 3
    )  # of the mean of 0.4, 0.6 and 0.5, in Student's t
    assert degrees[0] == pytest.approx(2)
    looked = within_blocks(BALANCED.assign(any_look=[False] * 5 + [True]))
    assert looked.any_look


def test_blocks_that_hold_one_cell_tell_nothing() -> None:
    alone = within_blocks(runs(("a", "x", 1.0), ("b", "y", 2.0)))
    assert (alone.degrees, alone.residual, len(alone.spectrum[0])) == (0, 0, 0)
    assert isnan(alone.noise)
    once = within_blocks(BALANCED[:2])
    assert once.logs[1] - once.logs[0] == pytest.approx(0.4)
    assert isnan(once.noise)
    chain = within_blocks(
        runs(("a", "x", 1.0), ("b", "x", 1.4), ("b", "y", 5.0), ("c", "y", 5.3), ("d", "w", 1.0))
    )
    assert chain.logs[2] - chain.logs[0] == pytest.approx(0.7)
    assert len(chain.spectrum[0]) == 2
    assert within_blocks(BALANCED[:0]).cells == []
    repeated = within_blocks(runs(("a", "x", log(2)), ("a", "x", log(8)), ("b", "x", log(8))))
    assert repeated.logs[1] - repeated.logs[0] == pytest.approx(log(2))
