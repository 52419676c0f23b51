"""The parquet and CSV files of a sweep folder, computed from the records in `cells/`."""

from collections.abc import Iterable
from itertools import count

from pandas import DataFrame

from vitsweep.console import was_terminated
from vitsweep.files import remove, write_atomically
from vitsweep.results.column_types import core_columns, write_table
from vitsweep.results.metrics import FLAGS, Type, own_metrics
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store
from vitsweep.tables.formatting import csv_text
from vitsweep.tables.load import from_rows
from vitsweep.tables.names import cell_names, varying_columns
from vitsweep.tables.sweep_tables import SweepTables

_HEAD = "cell_id cell status reason blocks".split()
_READ = (
    "replicates replicates_asked model data world_size images_per_step images_per_second "
    "images_per_second_sd step_time_ms speedup speedup_low speedup_high speedup_sd claim p_holm claim_low "
    "claim_high num_pairs speedup_note peak_gib mfu data_ms forward_ms backward_ms optimizer_ms "
    "communication_ms compile_seconds loss_last accuracy_top1 accuracy_top1_sd accuracy_difference "
    "accuracy_difference_low accuracy_difference_high accuracy_claim train_seconds seconds_to_target "
    "flags device torch git_commit started_at"
).split()
"""Columns of a CSV, besides what varies and the user's own."""
MOST_COLUMNS = 45
"""Of a CSV: a person reads no more. The parquet has all."""
SAMPLES: dict[str, Type | None] = {
    **dict.fromkeys(("run_id", "cell_id", "block"), "string"),
    **dict.fromkeys(("rank", "step"), "int64"),
    "step_time_ms": "double",
    **dict.fromkeys(("warm_up", "skipped"), "bool"),
}
"""Columns of `samples.parquet`."""


def collect(source: SweepTables | Store) -> SweepTables:
    """Write `runs.parquet`, `samples.parquet`, `cells.parquet` and `cells.csv`.

    A sweep with `sweep.replicate` gets `replicates.parquet` and `replicates.csv` as well. A command that
    SIGTERM ends leaves them to `vitsweep collect`.

    Returns:
        The tables of the sweep, for whatever shows them next.
    """
    tables = SweepTables.of(source)
    if was_terminated():
        return tables
    [store], table = tables.stores, tables.cells
    records = tables.records
    write_table(tables.every_run, store.root / "runs.parquet", core_columns("runs"))
    write_table(samples(records), store.root / "samples.parquet", SAMPLES)
    write_table(table, store.root / "cells.parquet", core_columns("cells"))
    write_atomically(store.root / "cells.csv", csv_text(for_people(table)))
    if tables.replicate_key:
        repeated = tables.replicates
        write_table(repeated, store.root / "replicates.parquet", {})
        write_atomically(store.root / "replicates.csv", csv_text(for_people(repeated)))
    else:  # of an earlier command
        for name in ("replicates.parquet", "replicates.csv"):
            remove(store.root / name)
    return tables


def for_people(table: DataFrame) -> DataFrame:
    """Return what a person reads of a table of cells or settings: at most `MOST_COLUMNS` columns.

    `cell` is a row's short name, `flags` its validity flags in one text. Of the user's metrics, and of the
    settings that vary, as many follow as there is room for. `nodes` is one of them, which `world_size` says
    elsewhere.
    """
    flags = {f: table[f].eq(True).fillna(False) for f in FLAGS if f in table}
    texts = [" ".join(f for f, of in flags.items() if of.iloc[row]) for row in range(len(table))]
    known = table.assign(cell=cell_names(table), flags=texts) if len(table) else table
    head, read = ([c for c in names if c in known] for names in (_HEAD, _READ))
    own = list(own_metrics(table))
    nodes = ["nodes"] if "nodes" in table and table["nodes"].nunique() > 1 else []
    more = [*own, *(c for c in dict.fromkeys([*nodes, *varying_columns(table)]) if c not in read)]
    more = more[: MOST_COLUMNS - len(head) - len(read)]
    settings = [c for c in more if c not in own]
    return known[[*head, *settings, *read, *(c for c in own if c in more)]]


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
