"""Links, pipes and false names in a sweep folder that somebody else made."""

import json
import os
import re
from pathlib import Path

import pandas as pd
import pytest

from tests.builders import run
from vitsweep.data.damaged_images import list_damaged, read_damaged
from vitsweep.errors import VitsweepError
from vitsweep.execution.run_request import read_cell
from vitsweep.files import (
    UnsafeFileError,
    append_line,
    make_folder,
    read_text,
    remove,
    write_atomically,
    write_once,
)
from vitsweep.foreign import yaml_text
from vitsweep.launchers.slurm.state.jobs import JobArray
from vitsweep.report.html import write_report
from vitsweep.results import provenance
from vitsweep.results.provenance import is_own, masked_word
from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import DamagedRecordWarning, Store
from vitsweep.tables.formatting import csv_text
from vitsweep.tables.load import cells_of


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a file that no command may touch."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "profile").write_text("mine")
    return tmp_path / "home"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "sweep").create()
    store.save_run(run("aa"))
    return store


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_leads_elsewhere_is_not_emptied(store: Store, outside: Path, link) -> None:
    link(outside / "profile", store.root / ".lock")
    with pytest.raises(UnsafeFileError, match=r"link"), store.lock():
        pass
    assert (outside / "profile").read_text() == "mine"


WRITERS = {
    "write": lambda path: write_atomically(path, "theirs"),
    "once": lambda path: write_once(path, "theirs"),
    "append": lambda path: append_line(path, {}),
    "make": lambda path: make_folder(path / "inner"),
    "remove": remove,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("place", ["report", "cells", "jobs/one"])
def test_nothing_is_written_through_a_linked_folder(store, outside, writer, place):
    folder = store.root / place
    remove(folder)
    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(outside)
    with pytest.raises(UnsafeFileError, match=f"`{folder.name}`.* link"):
        WRITERS[writer](folder / "profile")
    assert [path.name for path in outside.iterdir()] == ["profile"]
    assert (outside / "profile").read_text() == "mine"


@pytest.mark.parametrize("writer", ["write", "append"])
def test_nothing_is_written_through_a_linked_file(store, outside, writer):
    path = store.root / "cells.csv"
    path.symlink_to(outside / "profile")
    with pytest.raises(UnsafeFileError, match=r"`cells\.csv`.* link"):
        WRITERS[writer](path)
    assert (outside / "profile").read_text() == "mine"
    remove(path)
    WRITERS[writer](path)
    assert (outside / "profile").read_text() == "mine"


def test_the_sweep_folder_itself_may_be_a_link(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").symlink_to(store.root)
    linked = Store(tmp_path / "elsewhere")
    linked.keep_row({"cell_id": "aa", "status": "measured"})
    assert store.kept_row("aa")["status"] == "measured"


def test_a_pipe_or_an_endless_file_is_not_read(store: Store) -> None:
    os.mkfifo(store.root / "pipe")
    (store.root / "zeros").symlink_to("/dev/zero")
    with (store.root / "sparse").open("wb") as handle:
        handle.truncate(2**40)
    for name, kind in {"pipe": "regular", "zeros": "link", "sparse": "large"}.items():
        with pytest.raises(OSError, match=rf"{name}.*{kind}"):
            read_text(store.root / name)
    with pytest.raises(UnsafeFileError, match=r"`.*pipe`"):
        WRITERS["write"](store.root / "pipe")  # root would replace /dev/null
    assert (store.root / "pipe").is_fifo()


@pytest.mark.parametrize(
    "names", [{"cell_id": "/tmp/elsewhere"}, {"cell_id": "bb"}, {"run_id": "../../x"}]
)
def test_a_record_under_a_false_name_is_left_out(store: Store, names: dict[str, str]) -> None:
    [path] = (store.cell("aa") / "runs").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    with pytest.warns(DamagedRecordWarning, match=r"left out \("):
        assert list(store.runs()) == []


@pytest.mark.parametrize("cell_id", ["/tmp/x", "..", "a/b", "-x", "", None, "a\n"])
def test_what_is_no_id_names_no_folder(store: Store, cell_id) -> None:
    with pytest.raises(VitsweepError, match=re.escape(repr(cell_id))):
        store.keep_row({"cell_id": cell_id})


def test_linked_cells_are_left_out_by_name(store: Store, outside: Path) -> None:
    (store.cells / "bb").symlink_to(store.cells / "aa")
    with pytest.warns(DamagedRecordWarning, match=r"\bbb\b.* link"):
        assert store.cell_ids() == ["aa"]


@pytest.mark.parametrize("text", ["--user=root", "7 8", "7;reboot", "seven"])
def test_an_id_of_slurm_is_a_number(store: Store, text: str) -> None:
    array = JobArray(store.root / "jobs" / "a")
    write_atomically(array.folder / "slurm_id", text)
    with pytest.raises(VitsweepError, match=re.escape(f"{text!r}")):
        _ = array.slurm_id
    remove(array.folder / "slurm_id")
    append_line(array.folder / "0.jsonl", {"event": "job_start", "array_id": text})
    with pytest.raises(VitsweepError, match=re.escape(f"{text!r}")):
        _ = array.slurm_id


CELL = {"model": {"_target_": "vitsweep.model.vit.ViT", "depth": 2}, "seed": 0}


def test_a_damaged_or_foreign_cell_is_frozen_anew(store: Store, monkeypatch, tmp_path) -> None:
    path = store.cell("aa") / "cell.yaml"
    document = {"cell_id": "aa", "overrides": [], "cell": CELL}
    for damaged in (
        "",
        "- 1",
        "cell: {model: ",
        "[" * 5000,
        "cell: {model: {_target_: os.system}}",
    ):
        path.write_text(damaged)
        store.freeze("aa", document)
        assert store.frozen("aa") == document, damaged[:40]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another user's"))
    store.freeze("aa", document | {"overrides": ["mine"]})
    assert Store(store.root).frozen_by("aa") == (document | {"overrides": ["mine"]}, True)
    store.freeze("aa", document)
    assert store.frozen("aa")["overrides"] == [], "what was typed last"
    assert store.digest("aa")
    path.write_text(path.read_text().replace("vitsweep.model.vit.ViT", "os.system"))
    with pytest.raises(VitsweepError, match=r"aa/cell\.yaml`"):
        store.frozen("aa")
    store.freeze("aa", document)
    assert store.frozen("aa") == document


def test_a_reader_imports_nothing_that_a_foreign_cell_names(store, monkeypatch, tmp_path) -> None:
    (tmp_path / "evil_model.py").write_text("raise SystemExit('executed')")
    monkeypatch.syspath_prepend(tmp_path)
    parts = CELL | {"model": {"_target_": "evil_model.Model"}}
    text = json.dumps({"cell_id": "aa", "overrides": [], "cell": parts})
    (store.cell("aa") / "cell.yaml").write_text(text)
    with pytest.raises(VitsweepError, match=r"model\._target_=evil_model\.Model[^$]*`--trust`"):
        read_cell(store, "aa")
    monkeypatch.setattr(provenance, "_trusted", True)
    with pytest.raises((SystemExit, VitsweepError), match=r"executed|lacks"):
        read_cell(store, "aa")


def test_commands_know_who_typed_them(store: Store, monkeypatch, tmp_path) -> None:
    store.append_command({"command": "mine", "metrics": {"a": {"function": "m.f"}}})
    assert all(map(is_own, store.commands()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another user's"))
    store.append_command({"command": "theirs"})
    assert [e["command"] for e in store.commands() if not is_own(e)] == ["mine"]
    text = (store.root / "commands.jsonl").read_text().replace("theirs", "changed")
    (store.root / "commands.jsonl").write_text(text)
    assert sum(not is_own(e) for e in Store(store.root).commands()) == 2


def test_no_text_of_a_record_steers_the_terminal_or_a_spreadsheet(store: Store) -> None:
    store.save_run(
        run("bb", status=Status.failed, reason="=cmd|' /C calc'!A0 \x1b[2J\x9b1m\r\\bin")
    )
    text = csv_text(cells_of(store))
    assert "'=cmd|' /C calc'!A0 ?[2J?1m?\\bin" in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_typed_secrets_are_masked() -> None:
    words = {
        "model.arguments.api_key=abc": "model.arguments.api_key=***",
        "data.root=https://me:word@host/x": "data.root=https://***@host/x",
        "+x=hf_abcdefghijklmnop": "+x=***",
        "tokens=all": "tokens=all",
        "classifier=token": "classifier=token",
        "-m": "-m",
    }
    assert {word: masked_word(word) for word in words} == words
    record = run("aa", **{"model.arguments.token": "abc", "tokens": "all", "num_tokens": 17})
    spec = RunRecord.from_json(record.to_json()).spec
    found = (spec["model.arguments.token"], spec["tokens"], spec["num_tokens"])
    assert found == ("***", "all", 17)


def test_a_list_of_damaged_images_of_another_shape_lists_nothing(tmp_path: Path) -> None:
    for text in ("[1]", "{", '{"a": 1}'):
        (tmp_path / "damaged-0.json").write_text(text)
        list_damaged(tmp_path, tmp_path)
        assert not (tmp_path / "damaged-0.json").exists()
    assert read_damaged(tmp_path) == {"a": "1"}


COMPUTED = "speedup is_baseline log_ratio blocks throttled step_time_ms".split()
BAD_ENTRIES: list[dict[str, dict[str, object]]] = [
    *({"environment": {name: value}} for name in COMPUTED for value in ("x", [1])),
    {"environment": {"device": [1]}},
    {"environment": {"speedup": 1.0}},
    {"metrics": {"speedup": 1.0}},
    {"validity": {"steps_counted": "many"}},
    {"environment": {"host_cores": "many"}},
    {"spec": {"seed": "x"}},
]


def test_one_bad_entry_blocks_no_table(store: Store) -> None:
    """Of a record, of what was kept, predicted or frozen for a cell, of a column of somebody else's."""
    for number, bad in enumerate(BAD_ENTRIES):
        tree = json.loads(run(f"b{number}").to_json())
        for part, entries in bad.items():
            tree[part] |= entries
        tree.pop("checksum")
        path = store.cell(tree["cell_id"]) / "runs" / f"{tree['run_id']}.json"
        write_atomically(path, json.dumps(tree))
    for cell_id in ("c0", "c1", "c2"):
        (store.cell(cell_id)).mkdir()
    (store.cell("c0") / "record.json").write_text('{"status": "invalid", "speedup": "x"}')
    (store.cell("c1") / "prediction.json").write_text('{"speedup": 1.0, "predicted_mfu": [2]}')
    frozen = {"cell": {1: 2, None: 3, "precision": {"name": "O1", 7: 8}}}
    (store.cell("c2") / "cell.yaml").write_text(yaml_text(frozen))
    bad_column = {"unit": "s", "label": "l", "better": "maybe", "function": "m.f"}
    store.append_command({"command": "theirs", "metrics": {"worse": bad_column, "one": {}}})
    with pytest.warns(DamagedRecordWarning):
        page = write_report(store.root)
    cells = pd.read_csv(page.with_name("cells.csv")).set_index("cell_id")
    assert cells.loc["aa", "status"] == Status.measured
    assert set(cells.drop(["aa", "c0", "c1", "c2"])["status"]) == {Status.damaged}
    assert len(cells) == 4 + len(BAD_ENTRIES)
    assert page.exists()


def test_all_records_may_be_damaged(store: Store) -> None:
    [record] = store.root.glob("cells/aa/runs/*.json")
    record.write_text("{}")
    with pytest.warns(DamagedRecordWarning):
        assert write_report(store.root).exists()
