"""Small files that ask for much, in one folder: every verb ends soon, in words, and in little memory."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.builders import run
from tests.command import ROOT, forked, typed_and_measured
from vitsweep import extras
from vitsweep.files import append_line
from vitsweep.results.store import Store

MOST_KIB, MOST_SECONDS = 2**20, 240
"""Of a child: the memory is the bound; seconds end what would hang."""
LAUGHS = "l0: &l0 [lol]\n" + "".join(
    f"l{i + 1}: &l{i + 1} [{', '.join([f'*l{i}'] * 9)}]\n" for i in range(12)
)
FROZEN = {
    "laughs": f"{LAUGHS}cell: {{seed: *l9}}\noverrides: []\n",
    "levels": "cell: {a: " + "[" * 300_000,
    "base60": "overrides: []\ncell: {seed: 1" + ":59" * 300_000 + "}\n",
    "wide": "overrides: []\ncell:\n" + "".join(f"  s{i}: {i}\n" for i in range(30_000)),
    "tag": "!!python/object/apply:os.system [id]",
}
"""Name of a cell -> what stands in its `cell.yaml`."""
FAILED = {"status": "failed", "reason": "x"}


def columns(prefix: str, number: int) -> dict[str, float]:
    return {f"{prefix}{i}": 1.0 for i in range(number)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `results/sweep`, of two sound cells and one of each kind of harm."""
    folder = tmp_path_factory.mktemp("bounds")
    theirs = str(folder / "theirs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", theirs)
        store = Store(folder / "results" / "sweep").create()
        for cell_id, precision in (("aa", "fp32"), ("bb", "O1")):
            for block in ("b0", "b1", "b2"):
                store.save_run(run(cell_id, block, 100, precision=precision))
            store.freeze(cell_id, {"cell_id": cell_id, "overrides": [], "cell": {"seed": 0}})
        store.append_command({"command": "x", "cells": ["aa", "bb"], "baselines": {"bb": "aa"}})
    sound = run("aa", "b0", 100)
    for cell_id, text in FROZEN.items():
        (store.cells / cell_id).mkdir()
        (store.cells / cell_id / "cell.yaml").write_text(text)
        append_line(store.cells / cell_id / "attempts.jsonl", {"event": "start"})
        (store.cells / cell_id / "record.json").write_text(json.dumps(FAILED))
    wide = {f"wide{i}": columns(f"x{i}_", 400) for i in range(5)}
    for cell_id, metrics in {"columns": columns("c", 30_000), **wide}.items():
        changed = replace(sound, cell_id=cell_id, run_id=f"{cell_id}-b0", metrics=metrics)
        store.save_run(changed)
    store.save_run(replace(sound, cell_id="long", run_id="long-b0", reason="x" * 10**7))
    texts = {
        "sections": json.dumps({"a": [[]] * 3_000_000}),
        "escapes": '{"a": "' + "\\u0000" * 3_000_000 + '"}',
    }
    for cell_id, text in texts.items():
        for name in ("runs/a-b0.json", "record.json", "prediction.json", "attempts.jsonl"):
            path = store.cells / cell_id / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    marks = run(
        "bidi", "b0", 100, status="failed", reason="\u202egnp.exe\u2066 <!--<script></script"
    )
    store.save_run(marks)
    nulls = pa.chunked_array([pa.nulls(4_000_000)] * 10)
    parquet.write_table(pa.table({"cell_id": nulls, "run_id": nulls}), folder / "nulls.parquet")
    return folder


def child(folder: Path, *words: str) -> tuple[int, str]:
    """Type a verb in a process of its own; return its exit code and what it printed."""
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "mine"), "PYTHONPATH": str(ROOT)}
    running = forked(typed_and_measured, [*words], folder, environment)
    out, error = running.communicate(MOST_SECONDS)
    text, _, kib = out.rpartition("KIB ")
    assert "Traceback" not in text + error
    assert int(kib) < MOST_KIB, (words, kib)
    return running.returncode, " ".join((text + error).split())  # lines as wide as the terminal


@pytest.mark.slow
def test_verbs_end_soon_and_small_where_files_ask_for_much(folder: Path) -> None:
    code, said = child(folder, "collect", "sweep")
    assert code == 0
    for words in (
        "17 cells: 7 damaged",
        "columns-b0.json`: it has 30097 texts, and at most 20000 are read",
        "long-b0.json`: its row has 10000",
        "sections/runs/a-b0.json`: it has 3000002 sections",
        "with it the sweep has 1258 columns, and at most 1000 are read",
        r"\u202egnp.exe\u2066 <!--<script></script",
    ):
        assert words in said, said
    code, said = child(folder, "retry", "sweep", "--status", "failed,damaged")
    assert code == 2
    if "latex" in extras.FEATURES:
        code, said = child(folder, "report", "sweep", "--latex")
        assert code == 0, said
    if "gate" in extras.FEATURES:
        code, said = child(folder, "gate", "sweep", "--against", "nulls.parquet")
        assert code == 2
        assert "nulls.parquet`" in said
        assert "it has 40000000 rows" in said
    assert child(folder, "pack", "sweep")[0] == 0
    assert "Cells of sweep: damaged 7" in child(folder, "status", "sweep")[1]


@pytest.mark.slow
def test_a_bundle_is_checked_without_reading_what_its_footer_is_full_of(folder: Path) -> None:
    """A table has 40,000,000 rows, a text and its claims no end."""
    write_archive = pytest.importorskip("vitsweep.extras.bundle.archive").write_archive
    place = folder / "bundled" / "sweep"
    (place / "cells").mkdir(parents=True)
    sound = Store(place)
    for cell_id in ("aa", "bb"):
        for block in ("b0", "b1", "b2"):
            sound.save_run(run(cell_id, block, 100, precision="O1" if cell_id == "bb" else "fp32"))
    (place / "runs.parquet").write_bytes((folder / "nulls.parquet").read_bytes())
    (place / "claims.json").write_text(json.dumps({"format": 2, "margin": 0.1, "claims": []}))
    write_archive(place, folder / "bombs.tar.gz")
    code, said = child(folder, "reproduce", "bombs.tar.gz", "--check")
    assert code == 2
    assert "runs.parquet`" in said
    (place / "claims.json").write_text(json.dumps([[]] * 2_000_000))
    (place / "runs.parquet").unlink()
    (place / "cells.csv").write_bytes(bytes(2**28 + 2**20))
    write_archive(place, folder / "bombs.tar.gz")
    code, said = child(folder, "reproduce", "bombs.tar.gz", "--check")
    assert code == 2
    assert "bombs.tar.gz`" in said
    (place / "cells.csv").unlink()
    write_archive(place, folder / "bombs.tar.gz")
    code, said = child(folder, "reproduce", "bombs.tar.gz", "--check")
    assert code == 2
    assert "`claims.json`" in said
