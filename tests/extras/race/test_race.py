"""`sweep.search=race` as a user types it: refused, killed at a random moment, resumed, reported."""

import os
import signal

import pytest

from tests.command import Command
from tests.launchers.test_local_faults import wait_for
from vitsweep.extras.race.table import read_race
from vitsweep.report.html import write_report

GRID = (
    "-m",
    "precision=fp32,O1",
    "optimizer=adamw_loop,adamw_foreach,adamw_fused",
    "sweep.search=race",
)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (("sweep.search=race",), "`sweep.search=race` has one cell"),
        ((*GRID, "sweep.max_gpu_hours=1"), "`sweep.max_gpu_hours=1.0`"),
        ((*GRID, "hydra/launcher=basic"), "`hydra/launcher=basic`"),
    ],
)
def test_a_race_that_cannot_begin_is_refused(
    vitsweep: Command, typed: tuple[str, ...], told: str
) -> None:
    done = vitsweep(*typed)
    assert done.returncode == 2, done.stdout
    assert told in done.stderr


@pytest.mark.full
def test_a_race_killed_and_resumed_uses_every_run_and_ends_with_a_report(vitsweep: Command) -> None:
    asked = (*GRID, "sweep.confirm=2")
    running = vitsweep.start(*asked)
    wait_for(lambda: vitsweep.store.cells.exists() and len(list(vitsweep.store.runs())) >= 4)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()  # closes the pipes
    before = {run.run_id for run in vitsweep.store.runs()}
    done = vitsweep(*asked)
    assert done.returncode == 0, done.stdout + done.stderr
    race = read_race(vitsweep.store.root)
    assert race["ended"] == "halved"
    assert before <= {run.run_id for run in vitsweep.store.runs()}
    assert race["confirmed"][race["runner_up"]]["num_blocks"] == 2
    page = write_report(vitsweep.store).read_text()
    assert "2 fresh blocks" in page
