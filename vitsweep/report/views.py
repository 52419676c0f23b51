"""The parquet and CSV files of a sweep folder, computed from the records in `cells/`."""

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
from pandas import DataFrame

from vitsweep.errors import was_terminated
from vitsweep.files import remove, replacing, write_if_changed
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.tables.formatting import csv_text
from vitsweep.tables.load import from_rows
from vitsweep.tables.sweep_tables import SweepTables, tables_of


def collect(source: SweepTables | Store) -> SweepTables:
    """Write `runs.parquet`, `samples.parquet`, `cells.parquet` and `cells.csv`.

    A sweep with `sweep.replicate` gets `replicates.parquet` and `replicates.csv` as well. A command that
    SIGTERM ends leaves them to `vitsweep collect`.

    Returns:
        The tables of the sweep, for whatever shows them next.
    """
    tables = tables_of(source)
    if was_terminated():
        return tables
    [store], table = tables.stores, tables.cells
    records = tables.records
    _write_parquet(tables.every_run, store.root / "runs.parquet")
    _write_parquet(samples(records), store.root / "samples.parquet")
    _write_parquet(table, store.root / "cells.parquet")
    write_if_changed(store.root / "cells.csv", csv_text(table))
    if tables.replicate_key:
        repeated = tables.replicates
        _write_parquet(repeated, store.root / "replicates.parquet")
        write_if_changed(store.root / "replicates.csv", csv_text(repeated))
    else:  # of an earlier command
        for name in ("replicates.parquet", "replicates.csv"):
            remove(store.root / name)
    return tables


def samples(records: Iterable[RunRecord]) -> DataFrame:
    """Return the raw step times that records hold, one row per run, rank and step."""
    return from_rows(
        {
            "run_id": record.run_id,
            "cell_id": record.cell_id,
            "block": record.block,
            "rank": rank,
            "step": step,
            "step_time_ms": time_ms,
            "warm_up": step < record.samples["warm_up_steps"],
            "skipped": record.samples["skipped"][step],
        }
        for record in records
        if {"skipped", "warm_up_steps"} <= record.samples.keys()
        for rank, times in zip(
            record.samples.get("ranks", count()),
            record.samples.get("step_time_ms", []),
            strict=False,
        )
        for step, time_ms in enumerate(times)
    )


def _write_parquet(table: DataFrame, path: Path) -> None:
    """Columns that hold lists or several types are written as text: parquet has one type each."""
    plain = table.apply(_uniform) if len(table.columns) else table
    with replacing(path) as draft:
        plain.to_parquet(draft, index=False)


def _uniform(column: "pd.Series[Any]") -> "pd.Series[Any]":
    kinds = {type(v) for v in column.dropna()} if column.dtype == object else set()
    if len(kinds) > 1 or kinds & {list, dict, tuple}:
        if kinds <= {int, float}:
            return column.astype(float)
        return column.map(lambda v: v if v is None else str(v))
    return column
