"""`cells/pack.jsonl`: the same cells from one file, whatever happened to it."""

import io
import os
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import run
from vitsweep.cli import VERBS, main
from vitsweep.errors import VitsweepError
from vitsweep.execution.attempts import attempts
from vitsweep.files import UnsafeFileError, append_line, write_atomically
from vitsweep.results import pack
from vitsweep.results import store as store_module
from vitsweep.results.pack import FILE, opened
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import DamagedRecordWarning, Store
from vitsweep.tables.load import cells_of

RECORDS = [run("aa", block="b0"), run("aa", block="b1"), run("bb", status=Status.killed)]
START = {"event": "start", "run_id": "b0", "attempt": 1, "time": 1.0}


def filled(folder: Path) -> Store:
    """A sweep of two cells that ran and one that did not."""
    store = Store(folder).create()
    for record in RECORDS:
        store.save_run(record)
    for cell_id in ("aa", "bb", "cc"):
        store.freeze(cell_id, {"cell_id": cell_id, "overrides": [], "cell": {"seed": 1}})
    append_line(store.cell("aa") / "attempts.jsonl", START)
    write_atomically(
        store.cell("bb") / "prediction.json", '{"predicted_step_time_ms": 2.0, "made_at": "x"}'
    )
    store.keep_row({"cell_id": "cc", "status": "invalid", "reason": "No."})
    store.append_command({"command": "x", "cells": ["aa", "bb", "cc"], "baselines": {"aa": None}})
    return store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = filled(tmp_path / "sweep")
    assert store.pack() == 9
    return store


def seen(store: Store) -> dict[str, Any]:
    """What readers find of a sweep."""
    store = Store(store.root)
    return {
        "table": cells_of(store).drop(columns="predicted_at").to_json(),  # when it was filled
        "runs": list(store.runs()),
        "frozen": [store.frozen(cell_id) for cell_id in store.cell_ids()],
        "own": [store.is_own_cell(cell_id) for cell_id in store.cell_ids()],
        "attempts": attempts(store, "aa"),
        "predictions": store.prediction("bb") | {"predicted_at": ""},
        "kept": store.kept_row("cc"),
    }


def files(store: Store) -> list[str]:
    return sorted(p.name for p in store.cells.rglob("*"))


def test_readers_find_in_a_pack_what_they_found_in_files(store: Store, tmp_path: Path) -> None:
    assert files(store) == [FILE]
    assert seen(store) == seen(filled(tmp_path / "other" / "sweep"))


def test_readers_go_on_while_files_move_into_the_pack(tmp_path: Path) -> None:
    store = filled(tmp_path / "sweep")
    reader = Store(store.root)
    runs: Iterator[RunRecord] = reader.runs()
    assert next(runs) == RECORDS[0]
    store.pack()
    assert [*runs] == RECORDS[1:]
    assert reader.frozen("cc")["cell"] == {"seed": 1}


def test_what_is_written_after_a_pack_is_read_and_packed_later(store: Store) -> None:
    again, new = {**START, "run_id": "b1", "time": 2.0}, run("bb", block="b1")
    append_line(store.cell("aa") / "attempts.jsonl", again)
    store.keep_row({"cell_id": "cc", "status": "killed", "reason": "Later."})
    store.publish(new)
    loose = seen(store)
    assert [a.run_id for a in loose["attempts"]] == ["b0", "b1"]
    assert loose["kept"]["reason"] == "Later."
    assert loose["runs"] == [*RECORDS, new]
    assert store.pack() == 3
    assert files(store) == [FILE]
    assert seen(store) == loose


def test_the_first_record_of_a_run_stays(store: Store) -> None:
    late = replace(RECORDS[0], reason="It outlived its job.")
    assert store.publish(late) == RECORDS[0]
    store.save_run(late)
    assert [*store.runs("aa")] == RECORDS[:2]
    store.pack()
    assert [*Store(store.root).runs("aa")] == RECORDS[:2]
    assert files(store) == [FILE]


def test_what_is_written_while_it_is_packed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(tmp_path / "sweep")
    remove, path = store_module.remove, store.cell("aa") / "attempts.jsonl"
    again = {**START, "run_id": "b1", "time": 2.0}

    def late(place: Path) -> None:
        append_line(path, again) if len(path.read_bytes().splitlines()) == 1 else None
        remove(place)

    monkeypatch.setattr(store_module, "remove", late)
    store.pack()
    assert path.exists()
    assert [a.run_id for a in attempts(store, "aa")] == ["b0", "b1"]


def test_a_file_whose_new_line_the_disk_does_not_hold_stays(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier text of the same file is in the pack, and whole."""
    place, sync = store.cells / FILE, os.fsync
    append_line(store.cell("aa") / "attempts.jsonl", {**START, "run_id": "b1", "time": 2.0})
    before, size = seen(store), place.stat().st_size

    def damage(descriptor: int) -> None:
        sync(descriptor)
        whole = place.read_bytes()
        place.write_bytes(whole[:size] + whole[size:].replace(b"b1", b"b7"))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", damage)
        with pytest.raises(VitsweepError, match="nothing was removed"):
            store.pack()
    assert seen(store) == before
    assert store.pack() == 1
    assert seen(store) == before


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_a_command_that_dies_while_it_packs_loses_nothing(tmp_path: Path, share: float) -> None:
    store = filled(tmp_path / "sweep")
    before = seen(store)
    store.pack()
    whole = (store.cells / FILE).read_bytes()
    killed = filled(tmp_path / "killed" / "sweep")
    (killed.cells / FILE).write_bytes(whole[: int(share * len(whole))])
    assert seen(killed) == before
    killed.pack()
    assert files(killed) == [FILE]
    assert seen(killed) == before


def test_a_damaged_line_hides_no_other_and_names_its_run(store: Store) -> None:
    path = store.cells / FILE
    lines = path.read_bytes().split(b"\n")
    name = f"aa/runs/{RECORDS[1].run_id}.json".encode()
    [number] = [i for i, line in enumerate(lines) if line[9:].startswith(name)]
    lines[number] = lines[number].replace(b"b1", b"b7", 1)
    path.write_bytes(b"\n".join(lines))
    with pytest.warns(DamagedRecordWarning, match="damaged"):
        assert [*Store(store.root).runs()] == [RECORDS[0], RECORDS[2]]
    damaged = Store(store.root)
    with warnings.catch_warnings(action="ignore"):
        table = cells_of(damaged).set_index("cell_id")
        assert table.loc["aa", ["status", "damaged_runs"]].tolist() == ["measured", 1]
        damaged.publish(RECORDS[1])  # measured again
        assert [*damaged.runs()] == RECORDS
        damaged.pack()
        assert [*Store(store.root).runs()] == RECORDS


@pytest.mark.parametrize("content", [b"", b"\xff\t\n\n" * 100, b"{}\n"])
def test_a_pack_that_is_gone_leaves_no_cell_unnamed(store: Store, content: bytes) -> None:
    (store.cells / FILE).write_bytes(content)
    with warnings.catch_warnings(action="ignore"):
        rows = cells_of(Store(store.root)).set_index("cell_id")
    assert set(rows.index) == {"aa", "bb", "cc"}
    assert set(rows["status"]) == {"damaged"}


def test_damaged_records_and_those_of_waiting_cells_stay_in_their_files(tmp_path: Path) -> None:
    store = filled(tmp_path / "sweep")
    path = store.save_run(run("aa", block="b2"))
    path.write_text(path.read_text().replace("b2", "b3"))
    with warnings.catch_warnings(action="ignore"):
        store.pack(left={"bb"})
        assert path.exists()
        assert (store.cell("bb") / "cell.yaml").exists()
        assert [*Store(store.root).runs()] == RECORDS


def test_a_linked_pack_is_neither_read_nor_written(store: Store, tmp_path: Path) -> None:
    path, outside = store.cells / FILE, tmp_path / "profile"
    store.save_run(run("dd"))
    path.rename(outside)
    before = outside.read_bytes()
    path.symlink_to(outside)
    for act in (store.cell_ids, store.pack):
        with pytest.raises(UnsafeFileError, match=r"pack\.jsonl"):
            act()
    assert outside.read_bytes() == before


def test_a_pack_of_more_lines_or_names_than_a_sweep_has_is_not_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = store.cells / FILE
    monkeypatch.setattr(pack, "MOST_FILES", 20)
    whole = path.read_bytes()
    pack.forget(path)
    assert opened(path).runs
    many = io.BytesIO()
    for part in range(3):
        pack.add(many, {f"c{part}{number}/cell.yaml": "" for number in range(10)})
    names = b"".join(line for line in many.getvalue().splitlines(True) if b"[" in line)
    for more in (b"\n" * 30, names):
        path.write_bytes(whole + more)
        pack.forget(path)
        with pytest.raises(UnsafeFileError, match=r"pack\.jsonl`.*\b20\b"):
            opened(path)


def test_a_sweep_in_which_a_command_is_at_work_is_not_packed(tmp_path: Path, capsys: Any) -> None:
    store = filled(tmp_path / "sweep")
    with store.lock(), pytest.raises(VitsweepError, match="at work"):
        VERBS["pack"].run([str(store.root)])
    assert main.run(["pack", str(store.root)]) == 0
    assert "9 files moved" in capsys.readouterr().out


def test_what_a_pack_has_is_not_written_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (store.cells / FILE).stat().st_size
    for cell_id in ("aa", "bb", "cc"):
        store.put_back(cell_id)
    store.save_run(replace(RECORDS[0], reason="It outlived its job."))
    assert store.pack() == 4
    assert files(store) == [FILE]
    assert (store.cells / FILE).stat().st_size == size + 1
    monkeypatch.setattr(pack, "opened", pytest.fail)
    rank = Store(store.root)
    with monkeypatch.context() as readers:
        readers.setattr(pack, "opened", opened)
        rank.put_back("aa")
    assert rank.frozen("aa")["cell"] == {"seed": 1}


def test_lines_of_a_pack_count_by_checksum_name_and_position(tmp_path: Path) -> None:
    def line(head: str, content: str, wrong: int = 0) -> bytes:
        text = f"{head}\t{content}".encode()
        return b"%08x\t%s\n" % (zlib.crc32(text) ^ wrong, text)

    path = tmp_path / FILE
    path.write_bytes(
        b"".join(
            [
                line("", '["aa/cell.yaml", "bb/runs/r.json", 3, "../x/cell.yaml"]'),
                line("", '[["cc/cell.yaml"], "dd/cell.yaml"]'),
                line("", '"ee/cell.yaml"'),
                line("aa/cell.yaml", '"first"'),
                line("aa/cell.yaml", '"last"'),
                line("aa/runs/r.json", '"first"'),
                line("aa/runs/r.json", '"last"'),
                line("ff/cell.yaml", "damaged", wrong=1),
                line("gg/other.yaml", "no file of a cell"),
                line("hh/cell.yaml", "cut")[:-1],
            ]
        )
    )
    found = pack.Pack(path)
    assert {cell: sorted(runs) for cell, runs in found.runs.items()} == {
        "aa": ["r.json"],
        "bb": ["r.json"],
    }
    assert found.is_whole
    assert (found.text("aa/cell.yaml"), found.text("aa/runs/r.json")) == ("last", "first")
    assert [name in found for name in ("aa/cell.yaml", "bb/runs/r.json", "ff/cell.yaml", "hh/cell.yaml")] == [
        True, False, False, False,
    ]  # fmt: skip
    assert found.checksum("aa/cell.yaml") == zlib.crc32(b'aa/cell.yaml\t"last"')
    assert found.checksum("bb/runs/r.json") is None
    for name, content, lacks in (
        ("aa/cell.yaml", "last", False),
        ("aa/cell.yaml", "first", True),
        ("aa/runs/r.json", "other", False),
        ("bb/runs/r.json", "x", True),
    ):
        assert found.lacks(name, content) is lacks
    assert found.size("aa/cell.yaml") == 6
    for content, is_whole in (
        (b"", False),
        (line("aa/cell.yaml", "x"), False),
        (line("", "[]"), False),
    ):
        path.write_bytes(content)
        assert pack.Pack(path).is_whole is is_whole
    assert pack.Pack().is_whole
