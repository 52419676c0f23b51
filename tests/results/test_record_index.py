"""`runs.index`: the same records from one file, whatever happened to it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import run
from vitsweep.results import store as store_module
from vitsweep.results.record import FILE, RunRecord, Status
from vitsweep.results.store import Store

RECORDS = [run("aa", block="b0"), run("aa", block="b1"), run("bb", status=Status.killed)]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A sweep of three runs, which are in the index."""
    monkeypatch.setattr(store_module, "MIN_NEW_RECORDS", 1)
    store = Store(tmp_path / "sweep").create()
    for record in RECORDS:
        store.save_run(record)
    store.update_index(list(store.runs()))
    return store


def read(store: Store, monkeypatch: pytest.MonkeyPatch) -> tuple[list[RunRecord], int]:
    """Records as a new command reads them, and how many files were opened for them."""
    opened: list[str] = []
    from_json = RunRecord.from_json
    with monkeypatch.context() as patch:
        patch.setattr(RunRecord, "from_json", lambda text: opened.append(text) or from_json(text))
        records = list(Store(store.root).runs())
    return records, len(opened)


def test_records_in_the_index_are_not_read_from_their_files(store, monkeypatch):
    assert read(store, monkeypatch) == (RECORDS, 0)


def test_a_new_record_and_a_changed_one_are_read_from_their_files(store, monkeypatch):
    changed, new = replace(RECORDS[0], reason="changed"), run("cc")
    store.save_run(changed)
    store.save_run(new)
    now = [changed, *RECORDS[1:], new]
    assert read(store, monkeypatch) == (now, 2)
    again = Store(store.root)
    again.update_index(list(again.runs()))
    assert read(store, monkeypatch) == (now, 0)


def test_a_record_that_is_gone_is_gone(store, monkeypatch):
    (store.cell("bb") / "runs" / f"{RECORDS[2].run_id}.json").unlink()
    assert read(store, monkeypatch) == (RECORDS[:2], 0)


@pytest.mark.parametrize("damage", ["deleted", "empty", "cut", "other bytes", "no index"])
def test_a_damaged_index_changes_nothing(store, monkeypatch, damage):
    path = store.root / FILE
    text = path.read_bytes()
    middle = len(text) // 2
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "cut": text[:middle],
                "other bytes": text[:middle] + b"7" + text[middle + 1 :],
                "no index": b"\xff\t\n\n" * 100,
            }[damage]
        )
    records, opened = read(store, monkeypatch)
    assert records == RECORDS
    assert opened in range(1, 4)
    again = Store(store.root)
    again.update_index(list(again.runs()))  # a line that was cut in half swallows no other
    assert read(store, monkeypatch) == (RECORDS, 0)


def test_few_records_make_no_index(tmp_path):
    store = Store(tmp_path / "sweep").create()
    store.save_run(RECORDS[0])
    store.update_index(list(store.runs()))
    assert not (store.root / FILE).exists()


def test_an_index_that_cannot_be_written_is_no_error(store, monkeypatch):
    (store.root / FILE).unlink()
    (store.root / FILE).mkdir()
    again = Store(store.root)
    again.update_index(list(again.runs()))
    assert read(store, monkeypatch)[0] == RECORDS
