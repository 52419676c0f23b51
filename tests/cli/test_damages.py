"""One byte flipped, a file cut, emptied or swapped: every measured cell is there, or named as damaged."""

import json
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest

from tests.builders import run
from tests.command import NO_REPORT, Command
from vitsweep.cli import main
from vitsweep.files import remove
from vitsweep.results.pack import FILE
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.tables.load import cells_of

CELLS = ("aa", "bb", "cc")
BLOCKS = 3


def damage(path: Path, others: list[Path], chance: random.Random) -> str:
    kind = chance.choice(["flip", "cut", "empty", "swap"])
    content = bytearray(path.read_bytes())
    if kind == "flip" and content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del content[chance.randrange(len(content) + 1) :]
    elif kind == "empty":
        content.clear()
    else:
        content = bytearray(chance.choice(others).read_bytes())
    path.write_bytes(content)
    return kind


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("whole") / "sweep").create()
    for number, cell_id in enumerate(CELLS):
        store.freeze(cell_id, {"cell_id": cell_id, "overrides": [], "cell": {"seed": number}})
        for block in range(BLOCKS):
            store.save_run(run(cell_id, f"b{block}", 100.0 + number, minute=block, seed=number))
    baselines = {"aa": None, "bb": "aa", "cc": "aa"}
    store.append_command({"command": "x", "cells": [*CELLS], "baselines": baselines})
    assert main.run(["collect", str(store.root)]) == 0
    return store.root


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=[] if s < 4 else pytest.mark.full) for s in range(100)]
)
def test_after_any_damage_each_cell_is_measured_as_it_was_or_named(
    whole: Path, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(seed)
    folder = Path(shutil.copytree(whole, tmp_path / "sweep"))
    if seed % 2:
        Store(folder).pack()
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    path = chance.choice(files)
    damage(path, [other for other in files if other.suffix == path.suffix], chance)
    for verb in ("status", "collect", *(["report"] if seed % 10 == 9 else [])):
        assert main.run([verb, str(folder)]) in (0, 3), (verb, path)
        assert "Traceback" not in "".join(capsys.readouterr())
    with warnings.catch_warnings(action="ignore"):
        rows = {row["cell_id"]: row for row in cells_of(Store(folder)).to_dict("records")}
    assert set(rows) == set(CELLS), path
    for number, cell_id in enumerate(CELLS):
        row = rows[cell_id]
        if path.name == FILE and row["status"] == "damaged":
            continue  # all is lost, and no cell unnamed
        lost = row.get("damaged_runs", 0)
        assert row["status"] == "measured", path
        assert (row["blocks"], row["unadjusted_images_per_second"]) == (
            BLOCKS - lost,
            100.0 + number,
        )
    remove(folder)


def test_a_cell_whose_runs_are_all_damaged_is_named_by_every_reader(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "sweep"))
    for path in (folder / "cells" / "bb" / "runs").iterdir():
        path.write_text(json.dumps({"schema_version": 4}))
    with warnings.catch_warnings(action="ignore"):
        assert main.run(["status", str(folder)]) == 3
        assert "damaged" in capsys.readouterr().out
        assert main.run(["collect", str(folder)]) == 0
    assert ",damaged," in (folder / "cells.csv").read_text()


LINE = (
    "-m", "precision=fp32,bf16", "resources.ranks_per_node=1", "measurement.blocks=2",
    "sweep.baseline=null", NO_REPORT,
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    done = Command(folder)(*LINE)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100))
def test_after_any_damage_the_same_command_completes_the_sweep_and_keeps_what_is_intact(
    measured: Path, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    command = Command(Path(shutil.copytree(measured, tmp_path / "again")))
    if seed % 2:
        command.store.pack()
    files = sorted(p for p in command.store.root.rglob("*") if p.is_file() and p.name != ".lock")
    path = chance.choice(files)
    kind = damage(path, [other for other in files if other.suffix == path.suffix], chance)
    with warnings.catch_warnings(action="ignore"):
        intact = {record.run_id: record for record in command.store.runs()}
    done = command(*LINE)
    assert done.returncode == 0, (path, kind, done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    with warnings.catch_warnings(action="ignore"):
        after = {record.run_id: record for record in Store(command.store.root).runs()}
    assert {run_id: after.get(run_id) for run_id in intact} == intact, (path, kind)
    blocks = Counter(r.cell_id for r in after.values() if r.status == Status.measured)
    assert sorted(blocks.values()) == [2, 2], (path, kind)
    remove(command.folder)
