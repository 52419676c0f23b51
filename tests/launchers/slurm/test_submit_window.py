"""A submitter that dies around `sbatch`: the same command finds the array, or submits it anew."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import Command
from tests.launchers.slurm.conftest import SlurmClient
from tests.launchers.slurm.sweeps import HOLD, SMALL, Sweep
from tools.slurm_chaos import write_dying_sbatch

ASKED = ("-m", *SMALL, "sharding=ddp", "hydra.launcher.wait=false")
HELD = (*ASKED, HOLD, "seed=0,1,2", "sweep.baseline=null", "hydra.launcher.cells_per_job=1")


@pytest.fixture
def sweep(vitsweep: Command, slurm_environ: SlurmClient) -> Iterator[Sweep]:
    yield Sweep(vitsweep, slurm_environ)
    slurm_environ.cancel_all()


def die_while_submitting(
    sweep: Sweep, folder: Path, monkeypatch: pytest.MonkeyPatch, *asked: str
) -> None:
    """Type the command with an `sbatch` that kills it; the name of its folder says when."""
    write_dying_sbatch(folder)
    with monkeypatch.context() as dying:
        dying.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        assert sweep.command(*asked).returncode == -signal.SIGKILL
    assert not list(sweep.command.store.root.glob("jobs/*/slurm_id"))


@pytest.mark.slow
def test_an_array_is_not_submitted_twice_when_its_submitter_dies_before_it_notes_the_id(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_while_submitting(sweep, tmp_path / "dies_after", monkeypatch, *HELD)
    for _ in range(2):  # the first finds the array and notes its id
        again = sweep.command(*HELD)
        assert re.search("3 runs .*live jobs", again.stderr)
        [array] = sweep.arrays
        assert len(list(array.jobs())) == 3
    assert "waiting 3" in sweep.command("status", quick=False).stdout

    cancelled = sweep.command("cancel", quick=False)
    assert "Cancelled 3 jobs." in cancelled.stdout, cancelled.stderr
    assert sweep.client.states(array.slurm_id) == ["CANCELLED"] * 3
    cells = sweep.until_ended()
    assert cells["status"].tolist() == ["killed"] * 3
    assert cells["reason"].str.contains("before it started").all()


@pytest.mark.full
def test_an_array_whose_submitter_died_before_slurm_took_it_is_submitted_anew(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_while_submitting(sweep, tmp_path / "dies_before", monkeypatch, *ASKED)
    again = sweep.command(*ASKED)
    assert re.search("1 run .*live jobs", again.stderr), "`sbatch` may still be on its way"

    [array] = sweep.arrays
    facts = array.facts | {"time": time.time() - 3600}
    (array.folder / "array.json").write_text(json.dumps(facts))
    assert sweep.command(*ASKED).returncode == 0
    assert sweep.until_ended()["status"].tolist() == ["measured"]
    assert len(sweep.command.runs()) == 1
