"""Absolute columns are levels: what stalls, slow days and other nodes do to the throughput that is shown."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
from pandas import DataFrame

from tests.builders import from_runs, run, table
from tests.said import opening
from vitsweep.report.answer import answers
from vitsweep.results.record import SCREENING
from vitsweep.tables.cells import cells
from vitsweep.tables.sentences import say

SPEEDS = {"base": 100.0, "a": 130.0, "b": 80.0, "c": 101.0}
Blocks = Sequence[tuple[float, Sequence[str], str]]
"""Pace of the machine, the cells that ran and the nodes, of each block."""


def sweep(blocks: Blocks, stalled: Mapping[tuple[str, int], float] | None = None) -> DataFrame:
    """One run of each cell in its blocks; a stalled run is slower by a factor."""
    stalls = stalled or {}
    return table(*(
        run(cell, f"b{n}", SPEEDS[cell] * pace * stalls.get((cell, n), 1.0), minute=n, precision=cell,
            environment={"nodes_used": node})
        for n, (pace, members, node) in enumerate(blocks) for cell in members
    ))  # fmt: skip


def shown(runs: DataFrame) -> DataFrame:
    return cells(runs, dict.fromkeys(SPEEDS, "base")).set_index("cell_id")


EVERY, PAIR, ALONE = [*SPEEDS], ["base", "a"], ["base"]
FIVE = [(pace, EVERY, "n1") for pace in (1.0, 1.03, 1.0, 1.0, 0.97)]


def test_a_level_is_that_of_its_cell_whatever_happened_to_blocks_and_neighbours() -> None:
    slow_day = [(0.7, EVERY, "n1")] * 3 + [(1.0, ALONE, "n1")] * 5
    chunks = [(p, ["base", c], "n1") for p in (1.0, 1.2, 1.0) for c in ("a", "b", "c")]
    two_nodes = [(1.0, EVERY, "n1")] * 3 + [(0.9, EVERY, "n2")] * 2
    for name, blocks, stalled in (
        ("the baseline stalls", FIVE, {("base", 2): 0.1}),
        ("a cell stalls", FIVE, {("a", 2): 0.1}),
        ("two cells stall in one block", FIVE, {("a", 1): 0.3, ("base", 1): 0.1}),
        ("a slow day", slow_day, {}),
        ("a slow day on which the baseline stalls", slow_day, {("base", 1): 0.1}),
        ("a slow day of one cell", [(0.7, PAIR, "n1")] * 3 + [(1.0, EVERY, "n1")] * 5, {}),
        ("chunks", chunks, {}),
        ("chunks, one stalled run of the baseline", chunks, {("base", 4): 0.5}),
        ("two nodes", two_nodes, {}),
        ("two nodes, a stall", two_nodes, {("base", 4): 0.1}),
        ("one block", [(1.0, EVERY, "n1")], {}),
        ("two blocks", [(1.0, EVERY, "n1"), (1.02, EVERY, "n1")], {}),
    ):
        rows = shown(sweep(blocks, stalled))
        pace = float(np.median([pace for pace, *_ in blocks]))
        found = rows["images_per_second"] / pace
        assert found.to_dict() == pytest.approx({c: SPEEDS[c] for c in found.index}, rel=0.01), name
        step_ms = 64_000 / rows["images_per_second"]
        assert rows["step_time_ms"].to_numpy() == pytest.approx(step_ms.to_numpy()), name


def test_a_cell_that_shares_no_block_has_its_own_median() -> None:
    blocks = [(1.0, PAIR, "n1")] * 3 + [(pace, ["b"], "n1") for pace in (1.0, 3.0)]
    row = shown(sweep(blocks)).loc["b"]
    assert row["images_per_second"] == row["unadjusted_images_per_second"] == 160.0


def test_a_screened_cell_has_its_ratio_times_the_level_of_its_baseline() -> None:
    screening = [
        run(cell, "look", speed, precision=cell, environment={"purpose": SCREENING})
        for cell, speed in (("base", 50.0), ("b", 5.0))
    ]
    runs = pd.concat(
        [table(*screening), sweep([(1.0, PAIR, "n1")] * 5, {("base", 2): 0.1})], ignore_index=True
    )
    assert shown(runs).loc["b", "images_per_second"] == pytest.approx(10.0)


def test_levels_that_contradict_their_ratio_are_said_in_row_and_sentence() -> None:
    stalls = {("base", n): 0.1 + n / 1e3 for n in (1, 3, 5)}
    chunks = [(1.0, EVERY if n in (1, 3, 5) else EVERY[:3], "n1") for n in range(12)]
    quiet = [(1.0, EVERY, "n1")] * 5
    for blocks, stalled, said in (
        (chunks, stalls, dict.fromkeys("abc", "0.10")),
        (quiet, {("base", 2): 0.1}, dict.fromkeys("abc", "0.10")),  # however wide the interval is
        (quiet, {}, {}),
        ([(1.0, EVERY, "n1")] * 4 + [(1.0, ["base", "b"], "n1")], {}, {}),
    ):
        runs = sweep(blocks, stalled)
        notes = shown(runs)["speedup_note"]
        found = {c: note for c, note in notes.items() if opening("off_ratio") in note}
        assert found.keys() == said.keys()
        for cell, share in said.items():
            assert share in found[cell]
            [answer] = answers(from_runs(runs, dict.fromkeys(SPEEDS, "base")))
            assert cell not in answer.split()[0] or share in answer


def test_a_ratio_over_older_code_says_what_the_shown_levels_are() -> None:
    def told(newer: float) -> str:
        records = [
            run(cell, f"b{n}", speed * (1 + n / 1e3), minute=n,
                precision=cell, environment={"code_hash": code})
            for n in range(8) for code in ("old" if n < 4 else "new",)
            for cell, speed in (("base", 200.0 if n < 4 else newer), ("a", 260.0)) if n < 4 or cell == "base"
        ]  # fmt: skip
        return str(
            cells(table(*records), dict.fromkeys(("base", "a"), "base"))
            .set_index("cell_id")
            .loc["a", "speedup_note"]
        )

    older = told(400.0)
    assert "0.647" in older.removeprefix(say("earlier_baseline"))
    assert "block" not in older, "no run is far from its level"
    assert opening("off_ratio") not in told(200.0)
