"""A sweep folder that survives crashes, full disks, and several writers at once."""

import errno
import json
import os
import re
import stat
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import run
from tests.other_process import finished, other_process
from tests.refusals import require
from vitsweep import files
from vitsweep.errors import VitsweepError
from vitsweep.files import append_line, write_atomically
from vitsweep.results.record import SCHEMA_VERSION, OtherSchemaError, RunRecord, Status
from vitsweep.results.store import DamagedRecordWarning, Store
from vitsweep.results.sweeps import only_rounds
from vitsweep.training.checkpoint_files import CHECKPOINT_FOLDER


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "sweep").create()


def test_runs_are_read_back_from_their_cells(store: Store) -> None:
    records = [run("aa", block="b0"), run("aa", block="b1"), run("bb", status=Status.killed)]
    paths = [store.save_run(record) for record in records]
    assert list(store.runs()) == records
    assert paths[0] == store.cell("aa") / "runs" / f"{records[0].run_id}.json"


def test_a_record_is_parsed_once_until_its_file_changes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    from_json = RunRecord.from_json
    monkeypatch.setattr(RunRecord, "from_json", lambda text: parsed.append(text) or from_json(text))
    first, second = run("aa", block="b0"), run("bb", block="b0")
    path = store.save_run(first)
    assert list(store.runs()) == list(store.runs()) == list(store.runs("aa")) == [first]
    assert len(parsed) == 1

    Store(store.root).save_run(second)  # by another process
    assert list(store.runs()) == [first, second]
    assert len(parsed) == 2, "the new file alone"

    store.save_run(replace(first, reason="changed"))
    assert [record.reason for record in store.runs()] == ["changed", ""]
    assert len(parsed) == 3
    path.unlink()
    assert list(store.runs()) == [second]


def test_a_record_cut_in_half_is_named_and_the_others_are_read(store: Store) -> None:
    whole, cut, garbage = run("aa"), run("bb"), run("cc")
    store.save_run(whole)
    damaged = store.save_run(cut)
    damaged.write_text(damaged.read_text()[:100])
    binary = store.save_run(garbage)
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(DamagedRecordWarning) as warned:
        assert list(store.runs()) == [whole]
    texts = [str(one.message) for one in warned]
    assert len(texts) == 2
    assert f"{damaged} is damaged" in texts[0]
    assert f"{binary} is damaged" in texts[1]


def test_a_record_of_a_later_version_is_refused_with_its_file(store: Store) -> None:
    path = store.save_run(run("aa"))
    later = json.loads(path.read_text()) | {"schema_version": SCHEMA_VERSION + 1}
    path.write_text(json.dumps(later))
    with pytest.raises(OtherSchemaError) as error:
        list(store.runs())
    assert str(error.value).startswith(f"{path}: schema {SCHEMA_VERSION + 1} ")


def test_drafts_are_no_records(store: Store) -> None:
    path = store.save_run(run("aa"))
    (path.parent / f".{path.name}.1.draft").write_text("{half")
    assert len(list(store.runs())) == 1


def test_the_first_record_of_a_run_stands_unless_it_is_damaged(store: Store) -> None:
    first, late = run("aa", images_per_second=1.0), run("aa", images_per_second=2.0)
    assert store.publish(first) == first
    assert store.publish(late) == first
    path = store.cell("aa") / "runs" / f"{first.run_id}.json"
    path.write_text("{half")
    assert store.publish(late) == late
    assert list(store.runs()) == [late]


HOLDER = """
    import sys
    from pathlib import Path
    from vitsweep.results.store import Store
    with Store(Path(sys.argv[1])).lock():
        print("held", flush=True)
        sys.stdin.readline()
"""


def test_a_second_launcher_waits_says_so_and_goes_on_when_the_first_ends(store: Store) -> None:
    first = other_process(HOLDER, store.root)
    assert first.stdout
    assert first.stdin
    assert first.stdout.readline().strip() == "held"
    waited = []

    def release() -> None:
        waited.append(first.poll())
        first.stdin.write("go\n")
        first.stdin.flush()

    with store.lock(on_wait=release):
        assert waited == [None], "the first still held the folder, and this was said once"
    finished(first)


def test_a_launcher_that_was_killed_leaves_no_lock(store: Store) -> None:
    first = other_process(HOLDER, store.root)
    assert first.stdout
    assert not Store(store.root / "other").is_locked(), "nobody ever held it"
    assert first.stdout.readline().strip() == "held"
    assert store.is_locked()
    first.kill()
    first.communicate()
    assert not store.is_locked()
    with store.lock(on_wait=lambda: pytest.fail("nobody holds the folder")):
        pass


def test_a_free_folder_is_taken_at_once_and_given_back(store: Store) -> None:
    for _ in range(2):
        with store.lock(on_wait=lambda: pytest.fail("nobody holds the folder")):
            pass
    with pytest.raises(ZeroDivisionError), store.lock():
        raise ZeroDivisionError
    with store.lock(on_wait=lambda: pytest.fail("an error gives the folder back")):
        pass


def test_a_frozen_cell_stays_as_it_was(store: Store) -> None:
    parts = {"seed": 0, "rate": 1e-4, "half": None}
    document = {"cell_id": "aa", "overrides": [], "cell": parts, "code": {}}
    store.freeze("aa", document)
    store.freeze("aa", document | {"code": {"commit": "later"}})
    assert store.frozen("aa") == document


def test_the_latest_command_decides_on_baselines(store: Store) -> None:
    assert store.commands() == []
    store.append_command({"baselines": {"aa": None, "bb": "aa"}})
    store.append_command({"baselines": {"bb": "cc"}})
    assert store.baselines() == {"aa": None, "bb": "cc"}


def test_a_folder_that_cannot_be_made_is_reported_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VitsweepError) as error:
        Store(tmp_path / "file" / "sweep").create()
    require(str(error.value), f"`{tmp_path}/file/sweep` `sweep.folder=DIR`")
    assert "(File exists)" in str(error.value)


def test_only_one_command_races_in_a_sweep(store: Store) -> None:
    with (
        only_rounds(store),
        pytest.raises(VitsweepError, match="Another command"),
    ):
        with only_rounds(store):
            pass
    with only_rounds(store):
        pass


class Disk:
    """What a power cut would leave in the worst case: only what was waited for with `fsync`.

    A file keeps the content that it had then, a folder the names. Each call is counted, and so is a name
    given to a file that is not on the disk.
    """

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top, self.calls, self.early = top, 0, list[str]()
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        monkeypatch.setattr(files.os, "fsync", self._fsync)
        rename = os.replace

        def replace(draft: str, name: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
            path = Path(f"/proc/self/fd/{src_dir_fd}", draft)
            if self._contents.get(path.stat().st_ino) != path.read_bytes():
                self.early.append(name)
            rename(draft, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

        monkeypatch.setattr(files.os, "replace", replace)

    def _fsync(self, descriptor: int) -> None:
        self.calls += 1
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self._names[found.st_ino] = {e.name: e.inode() for e in os.scandir(descriptor)}
        else:
            self._contents[found.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def keeps(self, path: Path) -> bool:
        """Whether a file would be there, and whole."""
        number = self.top.stat().st_ino
        for name in path.relative_to(self.top).parts:
            number = self._names.get(number, {}).get(name, 0)
        return bool(path.read_bytes()) and self._contents.get(number) == path.read_bytes()


def test_a_power_cut_loses_nothing_that_was_said_to_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of cells are frozen within seconds: the first record waits for its cell."""
    disk = Disk(tmp_path, monkeypatch)
    store = Store(tmp_path / "results" / "s").create()
    cell, attempt = store.cell("a"), store.cell("a") / "attempts" / "b0.1"
    disk.calls, disk.early = 0, []
    store.freeze("a", {"cell": {"x": 1}})
    store.keep_row({"cell_id": "a", "status": "invalid"})
    append_line(cell / "attempts.jsonl", {"event": "start"})
    write_atomically(attempt / "draft.json", "{}")
    assert disk.calls == 0
    assert disk.early
    disk.early = []

    def kept(*paths: Path) -> None:
        assert [path for path in paths if not disk.keeps(path)] == []
        assert disk.early == []

    first = run("a")
    store.publish(first)
    kept(cell / "cell.yaml", cell / "runs" / f"{first.run_id}.json")
    disk.calls = 0
    second = run("a", "b1")
    store.publish(second)
    kept(cell / "runs" / f"{second.run_id}.json")
    assert disk.calls == 2, "the file, and its name"
    store.append_command({"cells": ["a"]})
    kept(store.root / "commands.jsonl", store.root / store.keep("code", "text", ".diff"))
    for name in ("weights.safetensors", f"{CHECKPOINT_FOLDER}/step-1/trained.json"):
        write_atomically(attempt / name, "{}", durable=True)
        kept(attempt / name)
    (cell / "cell.yaml").write_text("")
    store.freeze("a", {"cell": {"x": 2}})
    kept(cell / "cell.yaml")
    store.pack()
    kept(store.cells / "pack.jsonl")


def test_file_systems_that_cannot_sync_folders_are_used_and_failing_disks_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "s").create()
    for number in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EIO):

        def fsync(descriptor: int, number: int = number) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))

        monkeypatch.setattr(files.os, "fsync", fsync)
        record = run("a", f"b{number}")
        fails = pytest.raises(OSError, match=re.escape(os.strerror(number)))
        with fails if number == errno.EIO else nullcontext():
            assert store.publish(record) == record


def test_commands_that_a_power_cut_took_are_missed_aloud(store: Store) -> None:
    (store.root / "commands.jsonl").write_text("")
    with pytest.warns(DamagedRecordWarning, match="commands.jsonl"):
        assert store.commands() == []
