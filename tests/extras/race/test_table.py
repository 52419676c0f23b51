"""A race in words and as a table: who leads, who left when and why, which figures to trust."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run
from vitsweep.errors import VitsweepError
from vitsweep.extras.race.table import (
    RACE,
    race_lines,
    race_table,
    race_text,
    read_race,
)
from vitsweep.report.html import write_report
from vitsweep.results.store import Store
from vitsweep.tables.sentences import say


def of_cell(cell: str, blocks: list[int], **more: Any) -> dict[str, Any]:
    return {"cell_id": cell, "name": f"x={cell}", "blocks": blocks, **more}


@pytest.fixture
def race() -> dict[str, Any]:
    """Six blocks: `a` leads to `b` and the baseline `p`; `c` is dropped, `d` failed, `e` never ran."""
    ratios = {
        "p": {"num_blocks": 5, "speedup": 1.31, "speedup_low": 1.27, "speedup_high": 1.35},
        "b": {"num_blocks": 5, "speedup": 1.02, "speedup_low": 0.99, "speedup_high": 1.05},
    }
    cells = [
        of_cell("p", [0, 1, 2, 3, 4, 5], gain=-0.27),
        of_cell("a", [0, 4, 5], gain=0.0),
        of_cell("b", [1, 3, 5], gain=-0.01),
        of_cell("c", [2], gain=-0.2, dropped_after=4),
        of_cell("d", [], reason="out_of_memory: 3 GiB"),
        of_cell("e", []),
    ]
    return {
        "ended": "budget", "rank_by": "throughput", "indifference": 0.02, "error": 0.01, "seconds": 300.0,
        "num_runs": 43, "num_blocks": 6, "grid_runs": 86, "grid_blocks": 5, "leader": "a", "runner_up": "b",
        "baseline": "p", "cells": cells, "confirmed": ratios, "open": ["b", "e", "c"],
    }  # fmt: skip


def test_the_table_says_what_became_of_every_cell(race: dict[str, Any]) -> None:
    table = race_table(race).set_index("cell_id")
    assert table["state"].to_dict() == {
        "a": "leader", "b": "runner-up", "p": "in the race", "c": "dropped", "d": "out", "e": "never ran",
    }  # fmt: skip
    assert table.loc["c", ["first_block", "last_block"]].tolist() == [3, 4]
    assert table.loc["a", ["first_block", "last_block", "runs"]].tolist() == [1, 6, 3]
    assert table.loc["e", ["first_block", "last_block"]].isna().all()
    assert table.loc["b", "to_leader"] == pytest.approx(0.990, abs=1e-3)
    assert race_text(race_table(race)).iloc[4].to_dict()["why"] == "out_of_memory: 3 GiB"
    assert race_table({}).empty


def test_the_lines_name_winner_ratios_doubt_and_cost(race: dict[str, Any]) -> None:
    ratios = "1.31x [1.27, 1.35] against x=p and 1.02x [0.99, 1.05] against x=b"
    leads = {"rank_by": "throughput", "ratios": ratios, "blocks": "5 fresh blocks"}
    end = {"margin": 2, "runs": "43 runs", "minutes": "5.00", "share": 50, "blocks": "5 blocks"}
    doubt = {"cells": "3 other cells", "names": ", 1 never ran: x=b; x=e; x=c"}
    assert race_lines(race) == [
        say("race_leads", name="x=a", leads="may lead", **leads),
        say(
            "race_end",
            state="Not settled",
            name="x=a",
            **doubt,
            **end,
            more=" The same command goes on.",
        ),
    ]
    every_ran = race | {"cells": [c for c in race["cells"] if c["cell_id"] != "e"], "open": ["c"]}
    assert " by more than 2 %: x=c. 43 runs" in race_lines(every_ran)[1]
    for behind in (
        "p",
        "b",
    ):  # the leader of the runs that chose it is at most equal in the fresh ones
        confirmed = race["confirmed"] | {behind: {"num_blocks": 5, "speedup": 1.0}}
        for still_open in ([], race["open"]):
            told = race_lines(race | {"confirmed": confirmed, "open": still_open})
            assert told[0].startswith("x=a is not ahead in throughput: ")
    settled = race | {"open": [], "baseline": "a", "confirmed": {}}
    del settled["rank_by"]
    settled["objective"] = "throughput_per_cost"  # its name in a file of before
    leads = {"rank_by": "throughput per cost", "ratios": "no claim", "blocks": "0 fresh blocks"}
    assert race_lines(settled)[:2] == [
        say("race_leads", name="x=a, the baseline,", leads=say("race_unsure"), **leads),
        say(
            "race_end",
            state="Settled",
            cells="no dropped cell",
            name="x=a",
            names="",
            more="",
            **end,
        ),
    ]
    around = {"num_blocks": 5, "speedup": 1.02, "speedup_low": 0.99, "speedup_high": 1.05}
    one_block = {"num_blocks": 1, "speedup": 1.4, "speedup_low": None, "speedup_high": None}
    for against_base, is_shown in (
        (around, False),
        (one_block, False),
        (race["confirmed"]["p"], True),
    ):
        confirmed = {"p": against_base, "b": around}
        said = race_lines(race | {"open": [], "confirmed": confirmed})[0]
        assert said.startswith("x=a leads") == is_shown
        assert said.startswith(f"x=a {say('race_unsure')}") != is_shown
    assert race_lines({"cells": [of_cell("d", [], reason="failed: x")]}) == [
        say("nothing_measured", why="x=d: failed: x")
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": [3]}', '{"cells": [], "leader": "a"}'])
def test_a_damaged_race_is_refused(tmp_path: Path, text: str) -> None:
    assert read_race(tmp_path) == {}
    (tmp_path / RACE).write_text(text)
    with pytest.raises(VitsweepError, match="is damaged"):
        read_race(tmp_path)


def test_a_race_without_what_its_table_shows_is_damaged(tmp_path: Path) -> None:
    for cells in ([{"cell_id": "x"}], [{"cell_id": "x", "name": "x", "blocks": [0]}]):
        (tmp_path / RACE).write_text(json.dumps({"num_blocks": 1, "cells": cells, "leader": "x"}))
        with pytest.raises(VitsweepError, match="is damaged"):
            read_race(tmp_path)


def test_the_report_begins_with_the_race_whatever_settings_it_had(
    tmp_path: Path, race: dict[str, Any]
) -> None:
    store = Store(tmp_path / "s").create()
    for model in ("p", "q"):
        for block in range(5):
            for cell, speed in (("base", 100.0), ("fast", 130.0)):
                rate = speed + block % 2
                store.save_run(
                    run(model + cell, f"{model}{block}", rate, model=model, precision=cell)
                )
    baselines = {m + c: f"{m}base" for m in "pq" for c in ("base", "fast")}
    store.append_command({"baselines": baselines, "cells": list(baselines), "search": "race"})
    (store.root / RACE).write_text(json.dumps(race))
    text = write_report(store).read_text()
    assert f'<p class="answer">{race_lines(race)[0]}</p>' in text
    assert "settings." not in text.partition('<h2 id="table">')[0]
