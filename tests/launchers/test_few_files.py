"""A long sweep keeps few files while it runs."""

import os
import subprocess
import sys
from pathlib import Path

from tests.command import QUICK, ROOT
from vitsweep.results.pack import FILE
from vitsweep.results.record import Status
from vitsweep.results.store import Store

SWEEP = f"""
import vitsweep
from vitsweep.launchers import local
from vitsweep.results import store

local.MANY_FILES, store.MANY_FILES = 2, 3
settings = [*{list(QUICK)}, "resources.ranks_per_node=1", "sweep.baseline=null", "sweep.report=false"]
for blocks in (2, 3):
    vitsweep.sweep([*settings, f"measurement.blocks={{blocks}}"], seed=[0, 1], name="mine")
"""


def test_runs_are_packed_between_blocks_and_packed_cells_run_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SWEEP],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("files of cells moved") == 3, done.stdout
    store = Store(tmp_path / "results" / "mine")
    assert [path.name for path in store.cells.iterdir()] == [FILE]
    runs = [*store.runs()]
    assert [run.status for run in runs] == [Status.measured] * 6
    assert sorted(len({r.block for r in store.runs(c)}) for c in store.cell_ids()) == [3, 3]
    lines = (store.cells / FILE).read_text().splitlines()
    assert len([line for line in lines if "/cell.yaml\t" in line]) == 2
