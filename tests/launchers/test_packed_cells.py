"""A packed sweep goes on, and is packed again."""

from pathlib import Path

import pytest

import vitsweep
from tests.command import NO_REPORT, QUICK
from vitsweep.cli import main
from vitsweep.results.pack import FILE
from vitsweep.results.record import Status
from vitsweep.results.store import Store

SETTINGS = (*QUICK, NO_REPORT, "resources.ranks_per_node=1", "sweep.baseline=null")


def test_packed_cells_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for blocks in (2, 3):
        vitsweep.sweep([*SETTINGS, f"measurement.blocks={blocks}"], seed=[0, 1], name="mine")
        assert main.run(["pack", "mine"]) == 0
    store = Store(tmp_path / "results" / "mine")
    assert [path.name for path in store.cells.iterdir()] == [FILE]
    runs = [*store.runs()]
    assert [run.status for run in runs] == [Status.measured] * 6
    assert sorted(len({r.block for r in store.runs(c)}) for c in store.cell_ids()) == [3, 3]
    lines = (store.cells / FILE).read_text().splitlines()
    kept = [line for line in lines if "/cell.yaml\t" in line]
    assert len(kept) == 4, "each cell with the overrides of both commands; the last ones count"
