"""Records of another schema than this version's are refused by name; what is no record as well."""

import json
from typing import Any

import pandas as pd
import pytest

from tests.builders import run, table
from vitsweep.errors import VitsweepError
from vitsweep.results.record import SCHEMA_VERSION, OtherSchemaError, RunRecord
from vitsweep.results.store import Store
from vitsweep.tables.load import load

OTHERS = (SCHEMA_VERSION - 1, SCHEMA_VERSION + 1, 0)


def as_version(version: Any, record: RunRecord) -> str:
    return json.dumps(json.loads(record.to_json()) | {"schema_version": version})


@pytest.mark.parametrize("version", OTHERS)
def test_a_store_of_another_version_is_refused_with_its_file(tmp_path, version: int) -> None:
    store = Store(tmp_path / "old").create()
    path = store.save_run(run("aa"))
    path.write_text(as_version(version, run("aa")))
    with pytest.raises(OtherSchemaError, match=rf"{path.name}: schema {version} is not"):
        load(store.root)


@pytest.mark.parametrize("version", OTHERS)
def test_a_parquet_of_another_version_is_refused_with_its_path(tmp_path, version: int) -> None:
    path = tmp_path / "runs.parquet"
    mixed = table(run("aa"), run("bb"))
    mixed["schema_version"] = [SCHEMA_VERSION, version]
    mixed.to_parquet(path)
    with pytest.raises(OtherSchemaError, match=rf"runs.parquet`: schema {version} is not"):
        load(path)


def test_what_is_no_parquet_of_records_is_named(tmp_path) -> None:
    path = tmp_path / "kept.parquet"
    path.write_text("no parquet")
    with pytest.raises(VitsweepError, match=r"kept.parquet`.*`vitsweep collect`"):
        load(path)
    pd.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(VitsweepError, match=r"kept.parquet`.*`runs.parquet`"):
        load(path)


def test_infinite_and_nan_in_json_and_parquet_are_missing(tmp_path) -> None:
    store = Store(tmp_path / "odd").create()
    path = store.save_run(run("aa", metrics={"mfu": 0.25, "data_ms": 0.5}))
    text = path.read_text().rpartition(',\n "checksum"')[0] + "}"
    path.write_text(text.replace("0.25", "NaN").replace("0.5", "-Infinity"))
    assert load(store.root).loc[0, ["mfu", "data_ms"]].isna().all()
    table(run("aa", metrics={"mfu": float("inf")})).to_parquet(tmp_path / "runs.parquet")
    assert load(tmp_path / "runs.parquet", rows="runs")["mfu"].isna().all()
    assert load(tmp_path / "runs.parquet")["mfu"].isna().all()
