"""The folder in which the ranks of a run on this machine meet."""

import os
from pathlib import Path

import pytest

from vitsweep.execution.rank_processes import rendezvous


def test_a_folder_that_a_killed_process_left_is_removed_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, new = tmp_path / "vitsweep-rendezvous-left", tmp_path / "vitsweep-rendezvous-new"
    for folder in (left, new):
        folder.mkdir()
        (folder / "rendezvous").touch()
    os.utime(left, (0, 0))
    with rendezvous() as first:
        assert not left.exists()
        assert new.exists(), "its process may be about to lock it"
        used = Path(first.removeprefix("file://")).parent
        os.utime(used, (0, 0))
        with rendezvous():
            assert used.exists(), "a run in progress keeps its folder, however old"
    assert list(tmp_path.iterdir()) == [new]
