"""The table that compares two sweeps: what it says, what it refuses."""

from pathlib import Path

import pytest

from tests.builders import run
from vitsweep.errors import VitsweepError
from vitsweep.extras.gate.diff import changed
from vitsweep.results.store import Store
from vitsweep.tables.sweep_tables import SweepTables

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


def test_the_table_names_what_changed_and_the_largest_first(tmp_path: Path):
    a = written(tmp_path / "monday", 1.5)
    b = written(tmp_path / "friday", 1.2, scale=0.6, device="AMD EPYC 9R14")
    table = changed(SweepTables.of(a), SweepTables.of(b))
    assert table["name"].tolist() == ["O1 · ddp", "fp32 · fsdp"]
    assert table["claim"].tolist() == ["worse", "no difference shown"]
    assert table["change_low"][0] < table["change"][0] < table["change_high"][0] < 0.9


def test_a_folder_without_runs_is_refused(tmp_path: Path):
    a, empty = written(tmp_path / "a", 1.5), Store(tmp_path / "b").create()
    with pytest.raises(VitsweepError, match="`a` and `b` must both hold runs"):
        changed(SweepTables.of(a), SweepTables.of(empty))
