"""Files written by several writers at once, by killed ones, and on full disks."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.other_process import finished, other_process
from vitsweep import files
from vitsweep.files import (
    UnsafeFileError,
    append_line,
    write_atomically,
    write_once,
)
from vitsweep.foreign import read_lines


def test_threads_that_write_one_file_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    texts = [str(number) * 10_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            list(pool.map(lambda text: write_atomically(path, text), texts))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_while_writing_leaves_the_old_file_and_no_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "record.json"
    write_atomically(path, "old")

    def crash(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new", durable=True)
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


LIMITED = """
    import resource, signal, sys
    from pathlib import Path
    from vitsweep.files import append_line, write_atomically
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


def test_a_line_that_did_not_fit_is_reported_and_swallows_no_other(tmp_path: Path) -> None:
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
    from vitsweep.files import append_line
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
    from vitsweep.files import write_once
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


def test_the_claim_of_a_dead_writer_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SECONDS_OF_CLAIM", 0.1)
    (tmp_path / ".record.json.claim").touch()
    assert write_once(tmp_path / "record.json", "first")
    (tmp_path / ".record.json.claim").touch()  # its owner died after it had renamed its draft
    assert not write_once(tmp_path / "record.json", "second")
    assert (tmp_path / "record.json").read_text() == "first"


def test_a_folder_instead_of_a_file_is_named(tmp_path: Path) -> None:
    for write in (lambda: append_line(tmp_path, {}), lambda: write_atomically(tmp_path, "")):
        with pytest.raises(UnsafeFileError, match=re.escape(f"`{tmp_path}`")):
            write()
