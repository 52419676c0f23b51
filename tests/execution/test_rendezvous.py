"""The folder in which the ranks of a run on this machine meet, and the process that forks them."""

import os
import sys
from pathlib import Path

import pytest

from tests.other_process import finished, other_process
from tests.small_disk import fill, small_disk
from vitsweep.errors import storage_error
from vitsweep.execution.rank_processes import rendezvous


def test_a_full_temporary_disk_ends_the_command_and_is_no_fault_of_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", mib=1) as disk:
        monkeypatch.setattr("tempfile.tempdir", str(disk))
        fill(disk / "filler")
        with pytest.raises(OSError, match="No space left") as raised, rendezvous():
            pytest.fail("the ranks would have found the full disk")
        failed = storage_error(raised.value)
        assert failed is not None
        assert failed.filename.startswith(f"{disk}/")
        assert [path.name for path in disk.iterdir()] == ["filler"]
        (disk / "filler").unlink()
        with rendezvous() as meeting:
            assert not os.path.exists(meeting.removeprefix("file://"))


WITHOUT_SERVER = """
    import multiprocessing, sys
    from pathlib import Path
    from vitsweep.errors import VitsweepError
    from vitsweep.execution.rank_processes import LocalRanks, fork_server
    multiprocessing.set_executable("/bin/false")
    try:
        LocalRanks(fork_server(), print, (), range(2), Path(sys.argv[1]))
    except VitsweepError as error:
        print(error)
"""


def test_a_server_of_ranks_that_dies_at_once_is_reported_in_a_sentence(tmp_path: Path) -> None:
    told = finished(other_process(WITHOUT_SERVER, tmp_path))
    assert "Traceback" not in told
    assert f"`{sys.executable}`" in told


CLEANED = """
    import shutil, sys
    from pathlib import Path
    from vitsweep.errors import VitsweepError
    from vitsweep.execution.rank_processes import LocalRanks, fork_server, start_fork_server
    from vitsweep.files import make_socket_folder
    fork_server().set_forkserver_preload([])
    start_fork_server()
    shutil.rmtree(make_socket_folder())
    sys.stderr = sys.stdout
    try:
        LocalRanks(fork_server(), print, (), range(2), Path(sys.argv[1]))
    except VitsweepError as error:
        print(error, make_socket_folder(), sep="|")
"""


def test_a_cleaned_temporary_folder_is_reported_in_a_sentence(tmp_path: Path) -> None:
    said, _, folder = finished(other_process(CLEANED, tmp_path)).strip().partition("|")
    assert "Traceback" not in said + folder
    assert f"`{folder}`" in said
    assert "`TMPDIR=DIR`" in said
    assert not os.path.exists(folder)
