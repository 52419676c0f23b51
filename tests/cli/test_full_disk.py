"""Verbs that cannot write end in a sentence, and work again once they can."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_disk import fill, small_disk
from vitsweep.cli.main import run
from vitsweep.report import views

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "analysis" / "sample"


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own with a copy of the sample sweep whose tables are missing, and no space left."""
    with small_disk(tmp_path / "disk") as folder:
        shutil.copytree(SAMPLE, folder / "sample")
        for view in ("cells.parquet", "cells.csv", "runs.parquet", "samples.parquet"):
            (folder / "sample" / view).unlink()
        fill(folder / "filler")
        yield folder


@pytest.mark.parametrize("verb", ["collect", "report"])
def test_a_verb_that_cannot_write_says_so(
    full_disk: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [verb, str(full_disk / "sample")]
    assert run(typed) == 2
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().err
    assert not list(full_disk.rglob("*.draft"))
    (full_disk / "filler").unlink()
    assert run(["collect", str(full_disk / "sample")]) == 0


def test_status_works_on_a_full_disk(full_disk: Path) -> None:
    assert run(["status", str(full_disk / "sample")]) in (0, 3)


@pytest.mark.parametrize(("verb", "ends_with"), [("collect", 0), ("report", 2)])
def test_a_verb_without_the_right_to_write_says_so(
    verb: str,
    ends_with: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = shutil.copytree(SAMPLE, tmp_path / "sample")

    def refuse(*_: object) -> None:  # root, who may run these tests, may write everywhere
        raise PermissionError(errno.EACCES, "Permission denied", str(folder / "runs.parquet"))

    monkeypatch.setattr(views, "write_table", refuse)
    assert run([verb, str(folder)]) == ends_with
    shown = capsys.readouterr()
    assert "runs.parquet`" in shown.err
    assert "Permission denied" in shown.err
    assert ("img/s" in shown.out) is (verb == "collect")


def test_a_record_of_another_user_is_not_called_damaged(tmp_path: Path) -> None:
    """With `umask 077` its owner alone can read it; measured anew, it would be there twice."""
    sample = shutil.copytree(SAMPLE, tmp_path / "results" / "sample")
    hidden = next(sample.glob("cells/*/runs/*.json"))
    hidden.chmod(0)
    without = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] * (os.geteuid() == 0)
    for verb in ("status", "collect", "retry"):
        command = [*without, sys.executable, "-m", "vitsweep", verb, "sample"]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"{hidden.name}`: {os.strerror(errno.EACCES)}. " in done.stderr
        assert "damaged" not in done.stdout + done.stderr
    hidden.chmod(0o644)
