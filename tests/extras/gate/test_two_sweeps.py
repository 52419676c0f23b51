"""The table that compares two sweeps: what it says, where it lies, what it refuses."""

from pathlib import Path

import pytest

from tests.builders import run
from vitsweep.errors import VitsweepError
from vitsweep.extras.gate.diff import write_changes
from vitsweep.results.store import Store

BASELINES = {"base": "base", "fast": "base", "same": "base"}


def written(
    folder: Path,
    fast: float,
    scale: float = 1.0,
    device: str = "AMD EPYC 7B13",
) -> Store:
    store = Store(folder).create()
    speeds = {"base": 100.0, "fast": 100 * fast, "same": 101.0}
    specs = {"base": {}, "fast": {"precision": "O1"}, "same": {"sharding": "fsdp"}}
    for block in range(4):
        for number, (cell, speed) in enumerate(speeds.items()):
            noise = 1 + 0.004 * ((block + number) % 3 - 1)
            record = run(
                cell, f"b{block}", scale * speed * noise, minute=block,
                environment={"device": device},
                **specs[cell],
            )  # fmt: skip
            store.save_run(record)
    store.append_command({"baselines": BASELINES, "command": "python -m vitsweep -m ..."})
    return store


def test_the_table_names_what_changed_and_lies_beside_b(tmp_path: Path):
    a = written(tmp_path / "monday", 1.5)
    b = written(tmp_path / "friday", 1.2, scale=0.6, device="AMD EPYC 9R14")
    said, table, folder = write_changes(a, b)
    assert folder == b.root / "report" / "against_monday"
    assert said.startswith("1 of 2 speedups changed, most O1: 0.80x [")
    assert table["claim"].tolist()[:2] == ["worse", "no difference shown"]
    assert {p.name for p in folder.iterdir()} == {"changes.csv", "changes.md"}
    assert "| worse |" in (folder / "changes.md").read_text()


def test_two_folders_without_a_common_cell_are_refused(tmp_path: Path):
    a = written(tmp_path / "a", 1.5)
    b = Store(tmp_path / "b").create()
    b.save_run(run("other", "b0"))
    with pytest.raises(VitsweepError, match="no cell in common"):
        write_changes(a, b)


def test_a_folder_without_runs_and_the_same_folder_twice_are_refused(tmp_path: Path):
    a = written(tmp_path / "a", 1.5)
    with pytest.raises(VitsweepError, match="holds no runs"):
        write_changes(a, Store(tmp_path / "b").create())
    with pytest.raises(VitsweepError, match="named twice"):
        write_changes(a.root, a.root)
