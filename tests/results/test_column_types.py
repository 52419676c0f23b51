"""Parquet of unlike sweeps is read together: a column that occurs has one type everywhere."""

import math
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import dataset, parquet

from tests.builders import run
from vitsweep.report.views import collect
from vitsweep.results.column_types import (
    SCHEMA_KEY,
    _kinds,
    _type,
    core_columns,
    spec_types,
    type_of,
    write_table,
)
from vitsweep.results.metrics import COLUMNS, METRICS
from vitsweep.results.record import SCHEMA_VERSION, RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.load import load

SAMPLE = Path(__file__).parents[2] / "analysis" / "sample"


def sweep(folder: Path, *runs: RunRecord) -> Path:
    store = Store(folder).create()
    for each in runs:
        store.save_run(each)
    collect(Store(folder))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """A sweep as kept, one of which nothing ran, one that failed, a training, one of odd values."""
    left_out = shutil.ignore_patterns("*.parquet", "*.csv")
    collect(Store(shutil.copytree(SAMPLE, tmp_path / "kept", ignore=left_out)))
    trained = {"accuracy_top1": 0.5, "loss_last": 1}
    odd = {
        "precision.loss_scale": 2.0,
        "sharding.reshard_after_forward": 2,
        "memory.keep": ["linear", "norm"],
    }
    own = {"model.arguments.depth": 4, "model.arguments.kind": ["a"], "model.arguments.none": None}
    return [
        tmp_path / "kept",
        sweep(tmp_path / "empty"),
        sweep(
            tmp_path / "failed",
            run("aa", status=Status.failed, reason="no", images_per_second=None),
        ),
        sweep(tmp_path / "trained", run("aa", metrics=trained, **{"task.target_accuracy": 0.9})),
        sweep(
            tmp_path / "odd",
            run("aa", environment={"host_cores": 1.5, "cores_allowed": 1e30}, **odd, **own),
            run("bb", **{"precision.loss_scale": "dynamic", "model.arguments.depth": 0.5}),
        ),
    ]


@pytest.mark.parametrize("rows", ["cells", "runs", "samples"])
def test_unlike_sweeps_are_read_together(folders: list[Path], rows: str) -> None:
    files = [folder / f"{rows}.parquet" for folder in folders]
    schemas = [parquet.read_schema(file) for file in files]
    types = defaultdict(set)
    for schema in schemas:
        assert schema.metadata[SCHEMA_KEY] == str(SCHEMA_VERSION).encode()
        for field in schema:
            types[field.name].add(str(field.type))
    assert {c for c, found in types.items() if len(found) > 1 or "null" in found} == set()
    whole = pa.unify_schemas(schemas)
    together = dataset.dataset(list(map(str, files)), schema=whole).to_table()
    assert together.num_rows == sum(parquet.read_metadata(file).num_rows for file in files) > 0
    kinds = {(c, str(t)) for f in files for c, t in pd.read_parquet(f).dtypes.items()}
    assert len({c for c, _ in kinds}) == len(kinds), "pandas has one type of each column too"
    if rows != "samples":
        assert types["schema_version"] == {"int64"}
        assert all({*core_columns(rows)} <= {*schema.names} for schema in schemas)  # type: ignore[arg-type]


def test_values_have_the_type_of_their_column_and_the_users_columns_come_last(
    folders: list[Path],
) -> None:
    read = parquet.read_table(folders[-1] / "runs.parquet")
    found = {
        name: (str(read.schema.field(name).type), read[name].to_pylist())
        for name in read.column_names
    }
    assert found["precision.loss_scale"] == ("string", ["2", "dynamic"])
    assert found["sharding.reshard_after_forward"] == ("string", ["2", None])
    assert found["memory.keep"] == ("string", ["['linear', 'norm']", None])
    assert found["cores_allowed"] == ("int64", [None, None]), "beyond 64 bits"
    assert found["host_cores"] == ("int64", [None, None]), "1.5 is no number of cores"
    assert found["model.arguments.depth"] == ("double", [4.0, 0.5])
    assert found["model.arguments.kind"][0] == "string"
    assert "model.arguments.none" not in found
    assert [c for c in read.column_names if type_of(c) is None] == read.column_names[-2:]
    assert len(load(folders[-1] / "runs.parquet", rows="runs")) == 2


def test_each_core_column_and_field_of_the_spec_has_a_type() -> None:
    types = {"int64", "double", "bool", "string"}
    assert {type_of(c) for c in (*METRICS, *COLUMNS, *spec_types())} == types
    assert spec_types()["sharding.bucket_mib"] == "double"
    assert spec_types()["task.resume_from"] == "string"
    assert not [c for c in spec_types() if c.endswith("arguments")], "whose keys are the user's"


def test_core_columns_come_by_their_kinds_without_what_only_cells_have() -> None:
    for rows, own in (("cells", "comparison"), ("runs", "run")):
        columns = [*core_columns(rows)]  # type: ignore[call-overload]
        kinds = [COLUMNS[c].kind if c in COLUMNS else "other" for c in columns]
        order = ["head", "run", "other", "spec", "other", "validity", "environment", "comparison"]
        found = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
        assert own in found
        assert set(found) <= set(order)
        first = {kind: found.index(kind) for kind in set(found)}
        for kind in {"validity", "environment", "comparison"} & set(found):
            assert max(first["head"], first.get("run", 0), first["spec"]) < first[kind]
        assert ("blocks" in columns) == (rows == "cells")


def test_a_type_follows_from_the_values_that_are_allowed() -> None:
    for hint, kinds, name in (
        (bool, {bool}, "bool"),
        (bool | None, {bool}, "bool"),
        (int, {int}, "int64"),
        (Annotated[int, "x"] | None, {int}, "int64"),
        (float | int, {float, int}, "double"),
        (float, {float}, "double"),
        (Annotated[float | None, "x"], {float}, "double"),
        (int | Literal["auto"], {int, str}, "string"),
        (bool | int, {bool, int}, "string"),
        (Literal[1, 2], {int}, "int64"),
        (dict[str, int], {dict}, "string"),
        (None, set(), "string"),
    ):
        assert ({*_kinds(hint or type(None))}, _type(kinds)) == (kinds, name)


def test_the_type_of_a_column_is_known_by_its_name() -> None:
    for column, kind in (
        ("mfu", "double"), ("mfu_sd", "double"), ("predicted_at", "string"), ("predicted_peak_gib", "double"),
        ("precision", "string"), ("model", "string"), ("peak_reason", "string"), ("seed", "int64"),
        ("cell_id", "string"), ("oversubscribed", "bool"), ("model.arguments.x", None), ("own", None),
    ):  # fmt: skip
        assert type_of(column) == kind, column
    for rows, has in (("cells", True), ("runs", False)):
        columns = core_columns(rows)  # type: ignore[arg-type]
        assert [c in columns for c in ("speedup", "peak_gib", "throughput_spread")] == [has] * 3
        assert columns["mfu"] == "double"
        assert {**columns}.keys() >= {"precision", "sharding", "model", "data"}


def test_what_a_column_cannot_hold_is_missing(tmp_path: Path) -> None:
    table = pd.DataFrame(
        {
            "whole": [1, 2.0, 2.5, "x", 2**63, -(2**63) + 1025, math.nan],
            "yes": [True, False, None, True, True, None, None],
            "mfu": [1, 2.5, None, None, None, math.inf, np.float32(0.5)],
            "text": [1.0, 2.5, "a", None, True, [1], 3],
            "numbers": [1, None, np.int64(2), 0.5, True, None, np.bool_(False)],
            "mixed": [1, "a", None, 2.0, None, None, None],
            "empty": [None] * 7,
        },
        dtype=object,
    )
    core = {"whole": "int64", "yes": "bool", "text": "string", "gone": "double"}
    write_table(table, tmp_path / "t.parquet", core)  # type: ignore[arg-type]
    read = parquet.read_table(tmp_path / "t.parquet")
    types = {field.name: str(field.type) for field in read.schema}
    assert types == {**core, "mfu": "double", "numbers": "double", "mixed": "string"}
    assert read["whole"].to_pylist() == [1, 2, None, None, None, -(2**63) + 1024, None]
    assert read["yes"].to_pylist() == [True, False, None, True, True, None, None]
    assert read["text"].to_pylist() == ["1", "2.5", "a", None, "True", "[1]", "3"]
    assert read["numbers"].to_pylist() == [1.0, None, 2.0, 0.5, 1.0, None, 0.0]
    assert read["mixed"].to_pylist() == ["1", "a", None, "2", None, None, None]
    assert read["gone"].to_pylist() == [None] * 7
    assert read["mfu"].to_pylist()[:3] == [1.0, 2.5, None]
