"""A sweep folder that survives crashes, full disks, and several writers at once."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.builders import run
from tests.other_process import finished, other_process
from tests.refusals import require
from vitsweep import files
from vitsweep.errors import VitsweepError
from vitsweep.results.record import SCHEMA_VERSION, OtherSchemaError, RunRecord, Status
from vitsweep.results.store import DamagedRecordWarning, Store
from vitsweep.results.sweeps import only_rounds


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


def test_the_disk_is_waited_for_where_a_measurement_would_be_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the same command would write again is not: thousands of cells are frozen within seconds."""
    waits: list[int] = []
    monkeypatch.setattr(files.os, "fsync", waits.append)
    store = Store(tmp_path / "s").create()
    waits.clear()
    for write, is_waited_for in (
        (lambda: store.freeze("a", {"cell": {"x": 1}}), False),
        (lambda: store.keep_row({"cell_id": "a", "status": "invalid"}), False),
        (lambda: store.save_run(run("a")), True),
        (lambda: store.publish(run("a", "b1")), True),
        (lambda: store.keep("code", "text", ".diff"), True),
        (lambda: store.keep_code("abc", {"x.py": "1"}), True),
    ):
        write()
        assert bool(waits) == is_waited_for
        waits.clear()
