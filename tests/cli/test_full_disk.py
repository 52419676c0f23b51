"""Verbs that cannot write end in a sentence, and work again once they can."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.small_disk import fill, small_disk
from vitsweep.cli.main import run
from vitsweep.report import views

SAMPLE = Path(__file__).parents[2] / "analysis" / "sample"


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
    assert run(typed, {}) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not list(full_disk.rglob("*.draft"))
    (full_disk / "filler").unlink()
    assert run(["collect", str(full_disk / "sample")], {}) == 0


def test_status_works_on_a_full_disk(full_disk: Path) -> None:
    assert run(["status", str(full_disk / "sample")], {}) in (0, 3)


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

    monkeypatch.setattr(views, "_write_parquet", refuse)
    assert run([verb, str(folder)], {}) == ends_with
    shown = capsys.readouterr()
    assert "runs.parquet`" in shown.err
    assert "Permission denied" in shown.err
    assert ("img/s" in shown.out) is (verb == "collect")
