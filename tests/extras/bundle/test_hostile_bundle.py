"""A bundle made to do harm: it is refused by name, and writes, overwrites and executes nothing."""

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run as record
from vitsweep.cli.main import run
from vitsweep.errors import VitsweepError
from vitsweep.extras.bundle import archive
from vitsweep.extras.bundle.archive import extract
from vitsweep.results.pack import FILE, add
from vitsweep.results.store import Store

LINK, HARD, PIPE, DEVICE, FOLDER = (
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.FIFOTYPE,
    tarfile.CHRTYPE,
    tarfile.DIRTYPE,
)
PICKLE = b"cos\nsystem\n(S'touch executed'\ntR."


def entry(name: str, content: bytes = b"{}", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content) if fields.get("type", tarfile.REGTYPE) == tarfile.REGTYPE else 0
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def sparse(parts: bytes = b"1\n0\n1\n") -> tuple[tarfile.TarInfo, bytes]:
    """A file of a few bytes that says it is of a terabyte."""
    headers = {
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "s/cells.csv",
        "GNU.sparse.realsize": str(2**40),
    }  # fmt: skip
    return entry("s/cells.csv", parts.ljust(512, b"\0") + b"x", pax_headers=headers)


HOSTILE: dict[str, list[tuple[tarfile.TarInfo, bytes]]] = {
    "absolute path": [entry("/OUTSIDE/kept")],
    "path that leaves the folder": [entry("s/../../outside/kept")],
    "path that leaves it late": [entry("s/cells/a/runs/../../../../../outside/kept")],
    "symbolic link": [entry("s/cells.csv", type=LINK, linkname="../../outside/kept")],
    "link to a folder, and a file in it": [
        entry("s/cells", type=LINK, linkname="../../outside"),
        entry("s/cells/a/cell.yaml"),
    ],
    "hard link": [entry("s/cells.csv", type=HARD, linkname="/OUTSIDE/kept")],
    "pipe": [entry("s/cells.csv", type=PIPE)],
    "device": [entry("s/cells.csv", type=DEVICE, devmajor=1, devminor=5)],
    "file twice": [entry("s/cells.csv"), entry("s/cells.csv", b"other")],
    "name that differs by case": [entry("s/cells/a/cell.yaml"), entry("s/cells/A/cell.yaml")],
    "module": [entry("s/vitsweep/__init__.py", b"open('executed', 'w')")],
    "pack": [entry("s/cells/pack.jsonl", PICKLE)],
    "hidden file": [entry("s/.lock"), entry("s/cells/.a/cell.yaml")],
    "control characters": [entry("s/cells/a\x1b]0;owned\x07/cell.yaml")],
    "two sweeps": [entry("s/cells.csv"), entry("t/cells.csv")],
    "sparse file": [sparse()],
    "sparse file without its parts": [sparse(b"one")],
    "set-user-id folder": [entry("s/code", type=FOLDER, mode=0o4777)],
}


def written(path: Path, entries: list[tuple[tarfile.TarInfo, bytes]], outside: Path) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as file:
        for info, content in entries:
            info.name = info.name.replace("/OUTSIDE", str(outside))
            info.linkname = info.linkname.replace("/OUTSIDE", str(outside))
            file.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the one that is extracted to, whose file must stay as it is."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    return tmp_path / "outside"


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_entry_is_refused_and_nothing_is_overwritten_or_executed(
    kind: str, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = written(tmp_path / "bundle.tar.gz", HOSTILE[kind], outside)
    before = tree(tmp_path)
    assert run(["reproduce", str(path), "--check"]) == 2
    said = capsys.readouterr()
    assert path.name in said.err
    assert "\x1b" not in said.out + said.err
    assert tree(tmp_path) == before


def tree(folder: Path) -> dict[str, bytes]:
    paths = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    return {str(path): path.read_bytes() for path in paths}


def too_many(path: Path) -> None:
    entries = [entry(f"s/cells/c{number}/cell.yaml") for number in range(6)]
    written(path, entries, path)


def large_file(path: Path) -> None:
    written(path, [entry("s/cells.csv", bytes(3000))], path)


def large_sum(path: Path) -> None:
    written(path, [entry(f"s/cells/c{n}/cell.yaml", bytes(1500)) for n in range(5)], path)


def large_header(path: Path) -> None:
    written(path, [entry("s/cells.csv", pax_headers={"comment": "x" * 20_000})], path)


def cut(path: Path) -> None:
    large_file(path)
    path.write_bytes(path.read_bytes()[:-30])


def no_archive(path: Path) -> None:
    path.write_bytes(gzip.compress(b"not an archive" * 100))


def empty(path: Path) -> None:
    written(path, [], path)


@pytest.mark.parametrize(
    "write", [too_many, large_file, large_sum, large_header, cut, no_archive, empty]
)
def test_an_archive_that_is_too_large_or_none_is_refused(
    write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {
        "MOST_ENTRIES": 5,
        "MOST_BYTES": 2000,
        "MOST_TOTAL_BYTES": 6000,
        "MOST_AT_ONCE": 12_288,
    }
    for name, value in limits.items():
        monkeypatch.setattr(archive, name, value)
    write(tmp_path / "bundle.tar.gz")
    with pytest.raises(VitsweepError):
        extract(tmp_path / "bundle.tar.gz", tmp_path / "place")


def test_an_archive_within_the_limits_is_extracted(tmp_path: Path) -> None:
    path = written(tmp_path / "bundle.tar.gz", [entry("s/cells.csv", b"a")], tmp_path)
    root = extract(path, tmp_path / "place")
    assert (root / "cells.csv").read_bytes() == b"a"


def test_files_of_cells_that_cannot_be_read_are_left_out_by_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "s").create()
    store.save_run(record("aa"))
    (store.cell("aa") / "cell.yaml").write_bytes(b"a" * (2**20 + 1))
    with (store.cells / FILE).open("wb") as handle:
        add(handle, {"aa/attempts.jsonl": [[]]})
    left = archive._copy(store, tmp_path / "to", list(store.runs()))
    assert [word for line in left for word in line.split()[:3:2]] == [
        "`cells/aa/attempts.jsonl`", "out", "`cells/aa/cell.yaml`", "out"
    ]  # fmt: skip
    assert [path.name for path in (tmp_path / "to").rglob("*.json")] == ["aa-b0-0.json"]
