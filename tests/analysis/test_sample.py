"""The kept samples: statuses, the schema that notebooks rely on, tables that follow from the records.

`sample` has every status, on two CPU cores. `sample_h200` is `+sweep=meta_speedups` on one GPU.
"""

import json
import shutil
import textwrap
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from pandas import DataFrame
from rich.console import Console

from vitsweep import extras
from vitsweep.cli import main
from vitsweep.report.answer import answers
from vitsweep.results.record import Status
from vitsweep.results.store import Store
from vitsweep.spec.cell_spec import flatten
from vitsweep.spec.from_yaml import cell_from_tree
from vitsweep.tables.names import names_by_id
from vitsweep.tables.render import CellTable
from vitsweep.tables.stats import Claim
from vitsweep.tables.sweep_tables import SweepTables

SAMPLE = Path(__file__).parents[2] / "analysis" / "sample"
H200 = SAMPLE.with_name("sample_h200")
GOLDEN = Path(__file__).with_name("sample_schema.json")
TABLES = ("cells", "runs", "samples")
LONGER = {"measurement.warmup_min_seconds", "measurement.min_seconds"}
"""Of the runs of a cell whose steps are unsteady."""


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


def test_the_gpu_sample_has_names_claims_and_the_figures_of_the_blog() -> None:
    sweep = SweepTables.read(H200)
    names = names_by_id(sweep.cells)
    cells = sweep.cells.set_index(sweep.cells["cell_id"].map(names))
    assert set(cells["device"]) == {"NVIDIA H200"}
    assert set(cells["status"]) == {Status.measured}
    assert len(cells) == 17
    assert cells["claim"].value_counts().to_dict() == {
        Claim.faster: 11,
        Claim.slower: 3,
        Claim.no_difference_shown: 1,
        Claim.too_few_blocks: 1,
        Claim.baseline: 1,
    }
    blog = "O1 + adamw_foreach + batch_second + pooled"
    assert list(cells.index[cells["claim"] == Claim.too_few_blocks]) == [blog]
    assert cells["speedup"].idxmax() == (
        "bf16_masters + adamw_fused + pooled + compile_blocks + patch_embedding=linear"
    )
    assert cells["window_energy_j"].min() > 600  # a window is 1.5 s at about 670 W
    if "published" not in extras.FEATURES:
        return
    figures = extras.load("published.shown:figures_of")(sweep)
    figures = figures.set_index(figures["cell_id"].map(names))
    assert figures["number"].to_dict() == {
        f"{blog} + blog_560": 1.51,
        f"{blog} + blog_384_256px": 1.86,
        f"{blog.replace('O1', 'O3')} + blog_384_256px": 2.18,
    }
    assert (figures["measured_low"] > figures["number"]).all()


def test_the_pages_show_the_gpu_sample_as_a_terminal_of_100_columns_does() -> None:
    sweep = SweepTables.read(H200)
    [answer] = answers(sweep)
    answer = textwrap.fill(answer, 100)
    shown = _printed(CellTable(sweep.cells, "meta_speedups-cuda"))
    assert f"```text\n{shown}\n{answer}\n```" in _page("README.md")
    best = _printed(CellTable(sweep.cells, "analysis/sample_h200", rows=5))
    assert f"```text\n{best}\n```" in _page("docs/report.md")
    assert f"```text\n{answer}\n```" in _page("docs/report.md")


def _printed(table: CellTable) -> str:
    console = Console(width=100, record=True, file=StringIO())
    console.print(table)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def _page(name: str) -> str:
    return H200.parents[1].joinpath(name).read_text(encoding="utf-8")


def test_the_tables_follow_from_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for sample in (SAMPLE, H200):
        copied = tmp_path / "results" / sample.name  # a sweep is named by its folder
        shutil.copytree(sample, copied, ignore=shutil.ignore_patterns("*.parquet", "*.csv"))
        assert main.run(["collect", sample.name]) == 0
        for name in TABLES:
            kept, made = (pd.read_parquet(f / f"{name}.parquet") for f in (sample, copied))
            pd.testing.assert_frame_equal(made, kept)


def test_their_cells_have_the_ids_that_this_version_gives_them() -> None:
    for folder, count in ((SAMPLE, 30), (H200, 17)):
        store = Store(folder)
        frozen = {i: cell_from_tree(store.frozen(i)["cell"]) for i in store.cell_ids()}
        assert len(frozen) == count
        assert [cell.cell_id for cell in frozen.values()] == list(frozen)
        for run in store.runs():
            differ = {key for key, _ in run.spec.items() - flatten(frozen[run.cell_id]).items()}
            assert differ <= LONGER


def test_no_record_names_a_path_of_its_machine() -> None:
    for folder in (SAMPLE, H200):
        store = Store(folder)
        texts = [json.dumps(store.frozen(c.name)) for c in store.cells.iterdir()]
        texts += [p.read_text() for p in folder.rglob("*.json*")]
        assert not [t for t in texts if "/root/" in t or "/home/" in t]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(schema(), indent=1) + "\n")
