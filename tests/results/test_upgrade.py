"""Records of an older schema are read as this version writes them; newer ones are refused."""

import json
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from tests.builders import run, table
from vitsweep.errors import VitsweepError
from vitsweep.results import upgrade
from vitsweep.results.record import SCHEMA_VERSION, NewerSchemaError, RunRecord
from vitsweep.results.store import DamagedRecordWarning, Store
from vitsweep.results.upgrade import upgraded_rows
from vitsweep.tables.load import load

UNCOUNTED = run("aa", images_per_second=None, metrics={"mfu": 0.0, "hfu": 0.0, "loss_last": 0.0})
"""A run whose steps the loss scaler all skipped, as version 1 recorded it."""
COUNTED = run("bb", metrics={"mfu": 0.0})


def as_version(version: Any, record: RunRecord) -> str:
    return json.dumps(json.loads(record.to_json()) | {"schema_version": version})


def test_version_1_wrote_a_utilisation_of_zero_where_no_step_counted() -> None:
    record = RunRecord.from_json(as_version(1, UNCOUNTED))
    assert record.schema_version == SCHEMA_VERSION
    assert record.metrics["mfu"] is record.metrics["hfu"] is None
    assert record.metrics["loss_last"] == 0, "no other zero is touched"
    assert RunRecord.from_json(as_version(1, COUNTED)).metrics == COUNTED.metrics
    assert RunRecord.from_json(as_version(SCHEMA_VERSION, UNCOUNTED)) == UNCOUNTED


SAMPLED = replace(
    run("dd", images_per_second=16 / 0.012, metrics={"mfu": 0.4, "tokens_per_second": 1000.0}),
    samples={
        "step_time_ms": [[900.0, 10.0, 12.0, 5.0, 14.0], [900.0, 11.0, 12.0, 5.0, 37.0]],
        "skipped": [False, False, False, True, False],
        "warm_up_steps": 1,
    },
)
"""Medians of the slower rank of each step: 11, 12 and 37 ms; the second rank took 60 ms."""


def as_median(record: RunRecord) -> str:
    tree = json.loads(record.to_json())
    tree["metrics"]["step_time_ms"] = 12.0
    return json.dumps(tree | {"schema_version": 2})


def test_version_2_wrote_a_median_that_is_replaced_by_the_elapsed_time() -> None:
    record = RunRecord.from_json(as_median(SAMPLED))
    assert record.metrics["step_time_ms"] == pytest.approx(20.0)
    assert record.metrics["step_time_median_ms"] == 12.0
    assert record.metrics["step_time_mean_over_median"] == pytest.approx(20 / 12)
    assert record.metrics["rank_skew_ms"] == pytest.approx((60 - 36) / 3)
    assert record.metrics["images_per_second"] == pytest.approx(16 / 0.020)
    assert record.metrics["images_per_second_per_rank"] == pytest.approx(8 / 0.020)
    assert record.metrics["tokens_per_second"] == pytest.approx(600.0)
    assert record.metrics["mfu"] == pytest.approx(0.4 * 12 / 20)
    hours = record.metrics["epoch_hours_imagenet1k"]
    assert hours == pytest.approx(1_281_167 / record.metrics["images_per_second"] / 3600)
    assert record.validity["throughput_from"] == "window"
    again = RunRecord.from_json(record.to_json())
    assert again == record, "once"


def test_version_2_without_samples_keeps_its_median_and_says_so(tmp_path) -> None:
    bare = RunRecord.from_json(as_median(replace(SAMPLED, samples={})))
    assert bare.metrics["step_time_ms"] == 12.0
    assert bare.validity["throughput_from"] == "median"
    path = tmp_path / "runs.parquet"
    table(SAMPLED, UNCOUNTED).assign(schema_version=2).to_parquet(path)
    read = load(path, rows="runs").set_index("cell_id")
    assert read["images_per_second"]["dd"] == pytest.approx(16 / 0.012)
    assert read["throughput_from"].fillna("").to_dict() == {"dd": "median", "aa": ""}


def test_a_store_of_version_1_is_read_and_counts_as_measured(tmp_path) -> None:
    store = Store(tmp_path / "old").create()
    path = store.save_run(COUNTED)
    path.write_text(as_version(1, COUNTED))
    assert [record.schema_version for record in store.runs()] == [SCHEMA_VERSION]
    assert load(store.root, rows="runs")["schema_version"].tolist() == [SCHEMA_VERSION]


@pytest.mark.parametrize("rows", ["runs", "cells"])
def test_parquet_of_version_1_is_upgraded_by_row(tmp_path, rows) -> None:
    path = tmp_path / f"{rows}.parquet"
    mixed = table(UNCOUNTED, COUNTED, run("cc", metrics={"mfu": 0.4}))
    mixed["schema_version"] = [1, 1, SCHEMA_VERSION]
    (mixed if rows == "runs" else mixed.drop(columns="run_id")).to_parquet(path)
    read = load(path, rows=rows).set_index("cell_id")
    assert read["mfu"].isna().tolist() == [True, False, False]
    assert read["mfu"]["cc"] == 0.4
    assert read["loss_last"]["aa"] == 0
    assert set(read["schema_version"]) == {SCHEMA_VERSION}


def test_a_newer_parquet_is_refused_with_its_path(tmp_path) -> None:
    path = tmp_path / "runs.parquet"
    table(COUNTED).assign(schema_version=SCHEMA_VERSION + 1).to_parquet(path)
    with pytest.raises(NewerSchemaError, match=rf"runs.parquet`: schema {SCHEMA_VERSION + 1} is"):
        load(path)


def test_steps_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upgrade, "SCHEMA_VERSION", 4)
    steps = {
        1: lambda row, samples: {"metrics": {"mfu": row["mfu"] + 1}},
        2: lambda row, samples: {
            "metrics": {"mfu": row["mfu"] * 10},
            "spec": {"new": row["precision"]},
        },
        3: lambda row, samples: {},
    }
    monkeypatch.setattr(upgrade, "STEPS", steps)
    tree = json.loads(as_version(1, run("aa", metrics={"mfu": 0.5})))
    new = upgrade.upgraded(tree)
    assert (new["metrics"]["mfu"], new["spec"]["new"], new["schema_version"]) == (15, "fp32", 4)
    rows = upgraded_rows(
        pd.DataFrame([RunRecord.from_json(json.dumps(new | {"schema_version": 2})).row()]).assign(
            schema_version=1, mfu=0.5
        ),
        "here",
    )
    assert (rows["mfu"][0], rows["new"][0], rows["schema_version"][0]) == (15, "fp32", 4)


def test_every_older_version_has_its_step() -> None:
    assert sorted(upgrade.STEPS) == list(range(1, SCHEMA_VERSION))


def test_a_version_that_never_was_is_damage(tmp_path) -> None:
    store = Store(tmp_path / "odd").create()
    store.save_run(COUNTED).write_text(as_version(0, COUNTED))
    with pytest.warns(DamagedRecordWarning, match="never was a schema 0"):
        assert list(store.runs()) == []
    table(COUNTED).assign(schema_version=0).to_parquet(tmp_path / "runs.parquet")
    with pytest.raises(VitsweepError, match="never was a schema 0"):
        load(tmp_path / "runs.parquet")


def test_what_is_no_parquet_of_records_is_named(tmp_path) -> None:
    path = tmp_path / "kept.parquet"
    path.write_text("no parquet")
    with pytest.raises(VitsweepError, match=r"kept.parquet` is not a complete parquet file"):
        load(path)
    pd.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(VitsweepError, match=r"kept.parquet` holds no records"):
        load(path)


def test_infinite_and_nan_in_json_and_parquet_are_missing(tmp_path) -> None:
    store = Store(tmp_path / "odd").create()
    path = store.save_run(run("aa", metrics={"mfu": 0.25, "hfu": 0.5}))
    path.write_text(path.read_text().replace("0.25", "NaN").replace("0.5", "-Infinity"))
    assert load(store.root).loc[0, ["mfu", "hfu"]].isna().all()
    table(run("aa", metrics={"mfu": float("inf")})).to_parquet(tmp_path / "runs.parquet")
    assert load(tmp_path / "runs.parquet", rows="runs")["mfu"].isna().all()
    assert load(tmp_path / "runs.parquet")["mfu"].isna().all()
