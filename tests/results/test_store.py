"""A sweep folder that survives crashes, full disks, and several writers at once."""

import json
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import run
from vitsweep.errors import VitsweepError
from vitsweep.results.record import SCHEMA_VERSION, NewerSchemaError, RunRecord, Status
from vitsweep.results.store import (
    DamagedRecordWarning,
    Store,
    append_line,
    read_lines,
    write_atomically,
    write_if_changed,
    write_once,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "sweep").create()


def other_process(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finished(process: "subprocess.Popen[str]") -> str:
    answer, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return answer.strip()


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


def test_a_file_is_written_only_if_its_text_changes(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert write_if_changed(path, "one")
    before = path.stat()
    assert not write_if_changed(path, "one")
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert write_if_changed(path, "two")
    assert path.read_text() == "two"
    path.write_bytes(b"\xff")
    assert write_if_changed(path, "three")


def test_threads_that_write_one_file_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    texts = [str(number) * 10_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            list(pool.map(lambda text: write_atomically(path, text, durable=False), texts))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


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
    assert f"{damaged} is damaged and left out" in texts[0]
    assert f"{binary} is damaged and left out" in texts[1]


def test_a_record_of_a_later_version_is_refused_with_its_file(store: Store) -> None:
    path = store.save_run(run("aa"))
    later = json.loads(path.read_text()) | {"schema_version": SCHEMA_VERSION + 1}
    path.write_text(json.dumps(later))
    with pytest.raises(NewerSchemaError) as error:
        list(store.runs())
    assert str(error.value).startswith(f"{path}: schema {SCHEMA_VERSION + 1} is newer")


def test_drafts_are_no_records(store: Store) -> None:
    path = store.save_run(run("aa"))
    (path.parent / f".{path.name}.1.draft").write_text("{half")
    assert len(list(store.runs())) == 1


def test_a_crash_while_writing_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "record.json"
    write_atomically(path, "old")

    def crash(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


LIMITED = """
    import resource, signal, sys
    from pathlib import Path
    from vitsweep.results.store import append_line, write_atomically
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    path = Path(sys.argv[1])
    try:
        {work}
    except OSError as error:
        print(error.strerror)
"""


def test_a_disk_that_takes_only_half_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_atomically(path, "old")
    work = "write_atomically(path, 'x' * 5000)"
    assert finished(other_process(LIMITED.format(work=work), path)) == "File too large"
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_that_did_not_fit_is_told_and_swallows_no_other(tmp_path: Path) -> None:
    path = tmp_path / "commands.jsonl"
    append_line(path, {"number": 1})
    work = "append_line(path, {'long': 'x' * 5000})"
    assert finished(other_process(LIMITED.format(work=work), path)) == "No space left on device"
    append_line(path, {"number": 2})
    append_line(path, {"number": 3})
    assert read_lines(path) == [{"number": 1}, {"number": 2}, {"number": 3}]


def test_lines_cut_in_half_and_missing_files_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_lines(path) == []
    path.write_text('{"a": 1}\n{"b": \n\n{"c": 3}\n{"d"')
    assert read_lines(path) == [{"a": 1}, {"c": 3}]
    path.write_bytes(b'{"a": 1}\n' + bytes(range(256)) + b'\n12\n{"c": "\xff"}\n{"c": 3}\n')
    assert read_lines(path) == [{"a": 1}, {"c": 3}], "damaged bytes"


WRITER = """
    import sys
    from pathlib import Path
    from vitsweep.results.store import append_line
    path, writer, lines = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sys.stdin.readline()
    for number in range(lines):
        length = 10 ** (number % 5)
        append_line(path, {"writer": writer, "number": number, "text": str(writer) * length})
"""


def test_lines_of_many_writers_never_mix(tmp_path: Path) -> None:
    path, writers, lines = tmp_path / "log" / "lines.jsonl", 6, 100
    processes = [other_process(WRITER, path, writer, lines) for writer in range(writers)]
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        finished(process)
    entries = read_lines(path)
    assert len(entries) == writers * lines
    for writer in range(writers):
        own = [entry for entry in entries if entry["writer"] == writer]
        assert [entry["number"] for entry in own] == list(range(lines))
        assert all(set(entry["text"]) == {str(writer)} for entry in own)


ONCE = """
    import sys
    from pathlib import Path
    from vitsweep.results.store import write_once
    sys.stdin.readline()
    print(write_once(Path(sys.argv[1]), sys.argv[2] * 10000))
"""


def test_of_several_writers_of_one_file_exactly_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    processes = [other_process(ONCE, path, writer) for writer in range(6)]
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [finished(process) == "True" for process in processes]
    assert sum(won) == 1
    assert path.read_text() == str(won.index(True)) * 10000
    assert list(tmp_path.iterdir()) == [path]
    assert not write_once(path, "late")


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
    document = {"cell_id": "aa", "cell": {"seed": 0, "rate": 1e-4, "half": None}, "code": {}}
    store.freeze("aa", document)
    store.freeze("aa", document | {"code": {"commit": "later"}})
    assert store.frozen("aa") == document


def test_the_latest_command_decides_on_baselines(store: Store) -> None:
    assert store.commands() == []
    store.append_command({"baselines": {"aa": None, "bb": "aa"}})
    store.append_command({"baselines": {"bb": "cc"}})
    assert store.baselines() == {"aa": None, "bb": "cc"}


def test_a_folder_that_cannot_be_made_is_told_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VitsweepError) as error:
        Store(tmp_path / "file" / "sweep").create()
    assert str(error.value) == (
        f"The results folder `{tmp_path}/file/sweep` cannot be written (Not a directory). "
        "Choose another with `sweep.folder=DIR`, or free it."
    )
