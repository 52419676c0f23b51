"""The kept sample: every status, the schema that notebooks rely on, tables that follow from the records."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from pandas import DataFrame

from tests.command import Command
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import flatten
from vitsweep.spec.from_yaml import cell_from_tree

SAMPLE = Path(__file__).parents[2] / "analysis" / "sample"
GOLDEN = Path(__file__).with_name("sample_schema.json")
TABLES = ("cells", "runs", "samples")


def schema() -> dict[str, dict[str, str]]:
    """Column -> type of each table, in order; value types of the raw record."""
    tables = {name: pd.read_parquet(SAMPLE / f"{name}.parquet") for name in TABLES}
    return {name: _types(table) for name, table in tables.items()}


def _types(table: DataFrame) -> dict[str, str]:
    return {str(column): str(kind) for column, kind in table.dtypes.items()}


@pytest.mark.parametrize("table", TABLES)
def test_the_schema_is_the_kept_one(table: str) -> None:
    """A column that is renamed, dropped or retyped breaks notebooks: change the golden file knowingly.

    `python -m tests.analysis.test_sample` writes it.
    """
    kept, now = json.loads(GOLDEN.read_text())[table], schema()[table]
    assert list(now.items()) == list(kept.items())


def test_every_status_occurs() -> None:
    cells = pd.read_parquet(SAMPLE / "cells.parquet")
    assert set(cells["status"]) == set(Status) - {Status.damaged}
    ended_otherwise = cells[cells["status"] != Status.measured]
    assert (ended_otherwise["reason"].str.len() > 10).all()
    assert ended_otherwise["speedup"].isna().all()


def test_it_holds_claims_scaling_sequences_and_an_accuracy() -> None:
    cells = pd.read_parquet(SAMPLE / "cells.parquet")
    assert (cells["num_pairs"] >= 5).sum() >= 5
    assert set(cells["world_size"].dropna()) >= {1, 2, 4}
    assert set(cells["sequence_parallel"]) >= {"none", "ulysses", "ring", "dsp"}
    assert cells["accuracy_top1"].max() >= 0.95


@pytest.mark.slow
def test_the_tables_follow_from_the_records(tmp_path: Path) -> None:
    copied = tmp_path / "results" / "sample"
    shutil.copytree(SAMPLE, copied, ignore=shutil.ignore_patterns("*.parquet", "*.csv"))
    done = Command(tmp_path)("collect", "sample", quick=False)
    assert done.returncode == 0, done.stderr
    for name in TABLES:
        kept, made = (pd.read_parquet(f / f"{name}.parquet") for f in (SAMPLE, copied))
        pd.testing.assert_frame_equal(made, kept)


def test_its_cells_have_the_ids_that_this_version_gives_them() -> None:
    store = Store(SAMPLE)
    cells = {cell_id: cell_from_tree(store.frozen(cell_id)["cell"]) for cell_id in store.cell_ids()}
    assert len(cells) == 30
    assert [cell.cell_id for cell in cells.values()] == list(cells)
    assert all(run.spec.items() <= flatten(cells[run.cell_id]).items() for run in store.runs())


def test_no_record_names_a_place_of_its_machine() -> None:
    store = Store(SAMPLE)
    texts = [json.dumps(store.frozen(c.name)) for c in store.cells.iterdir()]
    texts += [p.read_text() for p in SAMPLE.rglob("*.json*")]
    assert not [t for t in texts if "/root/" in t or "/home/" in t]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(schema(), indent=1) + "\n")
