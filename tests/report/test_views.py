"""Files that `collect` makes from the records."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd

from tests.builders import run
from vitsweep.report.views import MOST_COLUMNS, collect, for_people
from vitsweep.results.store import Store

SAMPLE = Path(__file__).parents[2] / "analysis" / "sample"


def test_several_commands_may_collect_one_sweep_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep").create()
    for cell in range(4):
        store.save_run(run(f"cell{cell}"))
    with ThreadPoolExecutor(4) as pool:
        tables = list(pool.map(lambda _: collect(Store(store.root)), range(16)))
    assert all(len(found.cells) == 4 for found in tables)
    assert not list(store.root.glob("**/.*.draft"))


def test_a_csv_has_what_a_person_reads_and_the_parquet_all(tmp_path: Path) -> None:
    left_out = shutil.ignore_patterns("*.parquet", "*.csv")
    copied = shutil.copytree(SAMPLE, tmp_path / "sweep", ignore=left_out)
    tables = collect(Store(copied))
    found, whole = pd.read_csv(copied / "cells.csv"), pd.read_parquet(copied / "cells.parquet")
    assert len(found.columns) <= MOST_COLUMNS < len(whole.columns)
    for column in ("cell", "precision", "sharding", "speedup", "claim", "images_per_second"):
        assert found[column].notna().any(), column
    flagged = tables.cells["oversubscribed"].eq(True).fillna(False).to_numpy()
    assert (
        found["flags"].fillna("").str.contains("oversubscribed").to_numpy().tolist()
        == flagged.tolist()
    )
    own = {f"own_{i}": ["1", f"Own {i}", "higher", "f"] for i in range(40)}
    many = tables.cells.assign(**dict.fromkeys(own, 1.0))
    many.attrs["metrics"] = own
    assert {"own_0", "speedup"} <= {*for_people(many)}
    assert len(for_people(many).columns) == MOST_COLUMNS
