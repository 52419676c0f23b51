import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.builders import run, table
from tests.cells import TINY, entry
from tests.said import opening
from vitsweep.errors import VitsweepError
from vitsweep.execution.run_request import frozen_document
from vitsweep.report.answer import answers
from vitsweep.results.record import OtherSchemaError, Status
from vitsweep.results.store import DamagedRecordWarning, Store
from vitsweep.spec.cell_spec import flatten
from vitsweep.tables.load import (
    _sizes,
    cells_of,
    families_of,
    from_rows,
    load,
    tidy,
    with_wrong_steps,
)
from vitsweep.tables.names import CHOICES, names_by_id
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import one_device


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "first").create()
    for i in range(3):
        store.save_run(run("base", f"b{i}", 100, sweep="first"))
        store.save_run(run("fast", f"b{i}", 200, precision="O2", sweep="first"))
    store.save_run(run("dead", status=Status.killed, reason="SIGKILL", precision="bf16"))
    store.append_command({"baselines": {"base": "base", "fast": "base"}})
    return store


def test_a_folder_gives_one_row_per_cell_or_per_run(store):
    assert load(store.root)["cell_id"].tolist() == ["base", "dead", "fast"]
    assert len(load(store.root, rows="runs")) == 7


def test_without_the_log_of_commands_it_is_reported_why_there_is_no_speedup(store):
    (store.root / "commands.jsonl").unlink()
    rows = load(store.root).set_index("cell_id")
    assert rows["speedup"].isna().all()
    note = rows.loc["fast", "speedup_note"]
    assert note.startswith(opening("no_speedup") + "`commands.jsonl`")
    assert rows.loc["dead", "speedup_note"] != note
    assert any("`commands.jsonl`" in sentence for sentence in answers(SweepTables.of(store)))


def test_choices_are_ordered_as_in_the_menu(store):
    cells = load(store.root)
    assert cells["precision"].cat.categories.tolist() == ["fp32", "O2", "bf16"]
    assert cells.sort_values("precision")["cell_id"].tolist() == ["base", "fast", "dead"]
    assert cells["images_per_second"].dtype == float


def test_a_folder_of_sweeps_and_several_sources_are_read_together(store, tmp_path):
    second = Store(tmp_path / "second").create()
    second.save_run(run("other", sweep="second"))
    assert set(load(tmp_path)["sweep"]) == {"first", "second"}
    assert len(load(store.root, second.root)) == 4


def test_parquet_of_runs_and_of_cells_is_read(store):
    load(store.root, rows="runs").to_parquet(store.root / "runs.parquet")
    load(store.root).to_parquet(store.root / "cells.parquet")
    from_runs = load(store.root / "runs.parquet").set_index("cell_id")
    from_cells = load(store.root / "cells.parquet").set_index("cell_id")
    assert from_runs.loc["fast", "speedup"] == from_cells.loc["fast", "speedup"] == pytest.approx(2)
    with pytest.raises(VitsweepError, match=r"cells\.parquet`.*\bcells\b"):
        load(store.root / "cells.parquet", rows="runs")


def test_a_waiting_cell_is_read_from_its_frozen_spec(store):
    frozen = {"cell": {"precision": {"name": "O1", "loss_scale": None}, "seed": 3}}
    store.freeze("waiting", frozen)
    row = load(store.root).set_index("cell_id").loc["waiting"]
    assert (row["precision"], row["seed"]) == ("O1", 3)
    assert pd.isna(row["status"])


def test_a_cell_that_has_not_run_has_the_columns_of_one_that_has(tmp_path):
    own = ("model=module", "model.target=tests.user_modules.build_model", "model.blocks=layers",
           "++model.arguments.depth=2")  # fmt: skip
    store = Store(tmp_path / "s").create()
    for words in (
        (),
        own,
        (*own, "++model.arguments.depth=3"),
        ("runtime.variables={A:1}", "data=synthetic"),
    ):
        planned = entry(*TINY[-1:], *words)
        store.freeze(planned.cell_id, frozen_document(planned.spec, planned.tree, (), {}))
        row = load(store.root).set_index("cell_id").loc[planned.cell_id]
        spec, frozen = flatten(planned.spec), set(row[row.notna()].index)
        assert {*CHOICES, "seed", "images_per_step"} <= frozen
        assert {c for c in spec if ".arguments." in c or ".variables." in c} <= frozen
        assert {c: row[c] for c in spec if c in frozen} == {c: spec[c] for c in spec if c in frozen}
    names = names_by_id(load(store.root))
    assert any("user_modules.build_model" in name and "depth=3" in name for name in names.values())
    assert not any("module" in name.split(" · ") for name in names.values())


def test_a_folder_without_records_is_named(tmp_path):
    with pytest.raises(VitsweepError, match="`cells/`"):
        load(tmp_path)


def test_a_damaged_record_is_named_and_left_out(store):
    (store.cell("base") / "runs" / "cut.json").write_text('{"schema_version": 4, "run')
    with pytest.warns(DamagedRecordWarning, match=r"cut\.json is damaged"):
        assert len(load(store.root, rows="runs")) == 7


def test_a_record_of_another_schema_is_refused_by_name(store):
    path = next((store.cell("base") / "runs").iterdir())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 99}))
    with pytest.raises(OtherSchemaError, match=rf"{path.name}.*schema 99"):
        load(store.root)


def test_non_finite_numbers_are_missing(store):
    store.save_run(run("odd", metrics={"mfu": float("inf"), "data_ms": float("nan")}))
    row = load(store.root).set_index("cell_id").loc["odd"]
    assert row[["mfu", "data_ms"]].isna().all()


def test_text_in_a_metric_is_refused():
    with pytest.raises(VitsweepError, match="`step_time_ms`"):
        tidy(table(run("a")).assign(step_time_ms="fast"))


def test_two_devices_are_not_compared_unasked():
    both = table(run("a"), run("b", environment={"device": "NVIDIA H200"}))
    with pytest.raises(VitsweepError, match=r"EPYC.*H200"):
        one_device(both)


def many_records(folder: Path, num_cells: int) -> Path:
    """A sweep of five runs per cell, as large as those of a measurement."""
    spec = {f"group.field_{i}": i for i in range(50)}
    metrics = {"peak_rss_gib": 1.0, "data_ms": 0.1, "forward_ms": 1.0, "backward_ms": 2.0}
    text = run("CELL", "BLOCK", 100.0, metrics=metrics, **spec).to_json()
    tree = json.loads(text) | {"samples": {"step_time_ms": [[1.2345] * 30] * 2}}
    del tree["checksum"]
    text = json.dumps(tree, indent=1)
    for cell in (f"{i:012x}" for i in range(num_cells)):
        runs = folder / "cells" / cell / "runs"
        runs.mkdir(parents=True)
        for block in (f"b{i}" for i in range(5)):
            record = text.replace("CELL", cell).replace("BLOCK", block)
            (runs / f"{cell}-{block}-0.json").write_text(record)
    return folder


def num_calls(function, *arguments, **settings):
    """Python's own count of the calls of a function, those into C included: the same on any machine."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function(*arguments, **settings)
    finally:
        sys.setprofile(None)
    return count


def test_reading_takes_600_calls_per_record_and_none_per_row_of_a_parquet_file(tmp_path):
    folders = [many_records(tmp_path / str(cells), cells) for cells in (10, 20, 40)]
    files = [folder / "runs.parquet" for folder in folders]
    for folder, file in zip(folders, files, strict=True):
        load(folder, rows="runs").to_parquet(file)
    _, some, more = (num_calls(load, folder, rows="runs") for folder in folders)
    assert 0 < more - some <= 100 * 600
    _, some, more = (num_calls(load, file, rows="runs") for file in files)
    assert some == more


MEASURE = """
import sys
from vitsweep.tables.load import load
table = load(sys.argv[1], rows="runs")
print(len(table), open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
"""


@pytest.mark.full
def test_100_000_records_and_their_parquet_are_read_within_1_gib(tmp_path):
    folder = many_records(tmp_path / "big", 20_000)
    load(folder, rows="runs").to_parquet(tmp_path / "runs.parquet")
    for source in (folder, tmp_path / "runs.parquet"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, source], capture_output=True, check=True
        )
        rows, kib = map(int, done.stdout.split())
        assert (rows, kib < 2**20) == (100_000, True)


def test_a_damaged_run_hides_no_other_and_a_cell_without_an_intact_one_says_so(tmp_path) -> None:
    store = Store(tmp_path / "s").create()
    paths = [store.save_run(run("aa", f"b{n}", 100.0)) for n in range(5)]
    paths += [store.save_run(run("bb", "b0", 100.0))]
    store.keep_row({"cell_id": "bb", "status": "measured", "images_per_second": 100.0})
    for path in (paths[2], paths[5]):
        path.write_text(path.read_text().replace("100.0", "900.0"))
    with pytest.warns(DamagedRecordWarning, match="checksum"):
        table = cells_of(store).set_index("cell_id")
    assert list(table["damaged_runs"]) == [1, 1]
    assert list(table["status"]) == ["measured", "damaged"]
    assert table.loc["aa", ["images_per_second", "blocks"]].tolist() == [100.0, 4]
    assert "same command" in table.loc["bb", "reason"]
    assert table.loc["bb", "images_per_second"] != 100.0


def test_sizes_follow_from_the_fields_of_a_frozen_cell() -> None:
    fields = {
        "resources.nodes": 2,
        "resources.ranks_per_node": 4,
        "mesh.replicate": 3,
        "mesh.shard": 2,
    }
    fields |= {"batch.images_per_step": 10, "batch.resolution_px": 32}
    world = {"nodes": 2, "ranks_per_node": 4, "world_size": 8, "resolution_px": 32}
    assert _sizes(fields) == world | {"images_per_step": 10}
    assert _sizes(fields | {"batch.scope": "per_replica"}) == world | {"images_per_step": 60}
    assert _sizes(fields | {"batch.scope": "global"})["images_per_step"] == 10
    for name in fields:
        assert _sizes(fields | {name: "auto"}) == {}
        assert _sizes(fields | {name: True}) == {}


def test_the_families_of_commands_are_the_widest_questions(tmp_path) -> None:
    store = Store(tmp_path / "s").create()
    for cells, families in (
        ("ab", ["ab"]), ("a", ["ab"]), ("cd", ["ab", "cd"]), ("b", ["cd", "ab"]),
        ("abc", ["cd", "ab", "abc"]),
        ("ab", ["cd", "ab", "abc"]), ("", ["cd", "ab", "abc"]),
    ):  # fmt: skip
        store.append_command({"cells": list(cells)})
        assert families_of(store) == [frozenset(family) for family in families]


def test_cells_are_read_next_to_damaged_and_unrun_ones(store) -> None:
    (store.cell("fast") / "runs").mkdir(exist_ok=True)
    damaged = next(iter(sorted((store.cell("base") / "runs").glob("*.json"))))
    damaged.write_text("{")
    with pytest.warns(DamagedRecordWarning):
        rows = cells_of(store).set_index("cell_id")
    assert rows["damaged_runs"].to_dict() == {"base": 1, "dead": 0, "fast": 0}
    assert rows.loc["fast", "num_pairs"] == 2


def test_losses_that_leave_those_of_the_baseline_by_more_than_both_tolerances_are_wrong() -> None:
    facts = {
        "loss_tolerance": 0.1,
        "same_first_loss": "x",
        "same_losses": "y",
        "first_gradients": "10 1 1 1 1",
    }
    facts |= {
        "loss_step_1": 1.0,
        "loss_step_2": 2.0,
        "loss_step_3": 4.0,
        "gradient_tolerance": 0.05,
    }

    def status(**changed: object) -> str:
        base = {"cell_id": "base", "block": "b", "status": "measured", "reason": ""} | facts
        runs = pd.DataFrame([base, base | {"cell_id": "cell"} | changed])
        return with_wrong_steps(runs, {"cell": "base", "base": "base"})["status"][1]

    for wanted, changed in (
        ("measured", {}),
        ("measured", {"loss_step_2": 2.39}), ("wrong", {"loss_step_2": 2.41}),
        ("wrong", {"loss_step_2": 1.59}),
        ("measured", {"loss_step_3": 4.79}), ("wrong", {"loss_step_3": 4.81}),
        ("measured", {"loss_step_1": 1.0159}), ("wrong", {"loss_step_1": 1.0161}),
        ("measured", {"loss_step_2": 2.41, "same_losses": "other"}),
        ("measured", {"loss_step_1": 1.1, "same_first_loss": "other"}),
        ("measured", {"loss_step_2": 2.41, "block": "c"}),
        ("failed", {"loss_step_2": 2.41, "status": "failed"}),
        ("measured", {"loss_step_2": 2.59, "loss_tolerance": 0.2}),
        ("measured", {"first_gradients": "10.9 1 1 1 1"}), ("wrong", {"first_gradients": "11.1 1 1 1 1"}),
        ("measured", {"first_gradients": "10 1.19 1 1 1"}), ("wrong", {"first_gradients": "10 1.21 1 1 1"}),
        ("measured", {"first_gradients": None}), ("measured", {"loss_step_2": None}),
    ):  # fmt: skip
        assert status(**changed) == wanted, changed


def test_rows_of_the_default_objective_say_so_beside_others() -> None:
    rows = [
        {"model": "vit_nano"},
        {"model": "vit_nano", "objective": "lejepa"},
        {"status": "damaged"},
    ]
    found = from_rows(rows)["objective"]
    assert found.tolist()[:2] == ["classification", "lejepa"]
    assert found.isna().tolist() == [False, False, True]
    assert "objective" not in from_rows(rows[:1])
