"""Top-1 on the held-out images over each training: the evaluations of its record, and their mean."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.record import RunRecord, Status
from vitsweep.results.store import Store
from vitsweep.tables.formatting import missing
from vitsweep.tables.status import counted, final_status

POINT = ("epoch", "seconds", "accuracy_top1")
"""What is known of an evaluation: epochs trained, seconds of training until then, and top-1."""
COLUMNS = ("sweep", "cell_id", "run_id", *POINT)


def evaluations_of(store: Store, runs: DataFrame) -> DataFrame:
    """Return the evaluations of every training of a store, oldest first: `COLUMNS`.

    Args:
        store: of the records; only those of cells that trained are read.
        runs: its runs.
    """
    if "accuracy_top1" not in runs:
        return DataFrame(columns=list(COLUMNS))
    trained = dict.fromkeys(runs.loc[runs["accuracy_top1"].notna(), "cell_id"])
    records = (record for cell_id in trained for record in store.runs(str(cell_id)))
    rows = [
        {"sweep": store.name, "cell_id": record.cell_id, "run_id": record.run_id, **point}
        for record in records
        for point in _points(record)
    ]
    return DataFrame(rows, columns=list(COLUMNS))


def _points(record: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the whole evaluations of a record; none where nothing was trained."""
    for point in record.samples.get("training") or ():
        found = {column: point.get(column) for column in POINT}
        if not any(missing(value) for value in found.values()):
            yield found


def training_curves(cells: DataFrame, runs: DataFrame, evaluations: DataFrame) -> DataFrame:
    """Return one row per trained cell, and per cell that diverged, with its curves.

    Args:
        cells: one row per cell, or per setting over its repetitions (`tables.replicates`): such a row
            appears once for each repetition.
        runs: one row per run; only the curves of those that count are kept.
        evaluations: as `evaluations_of` returns them.

    Returns:
        The columns of `cells`, and `curves`: for each run of the cell a table `POINT`; `diverged`:
        whether the loss of this very cell became inf or NaN.
    """
    ids = cells["cell_ids"].str.split(",") if "cell_ids" in cells else cells["cell_id"]
    table = cells.assign(trained_cell=ids).explode("trained_cell", ignore_index=True)
    status = final_status(runs).set_index("cell_id")["status"]
    known = evaluations[evaluations["run_id"].isin(counted(runs)["run_id"])]
    curves: dict[tuple[str, str], list[DataFrame]] = {}
    for (sweep, cell, _), points in known.groupby(["sweep", "cell_id", "run_id"], sort=False):
        curves.setdefault((str(sweep), str(cell)), []).append(points[list(POINT)].astype(float))
    keys = zip(table["sweep"].astype(str), table["trained_cell"].astype(str), strict=True)
    table = table.assign(
        curves=Series([curves.get(key, []) for key in keys], table.index, dtype=object),
        diverged=table["trained_cell"].map(status) == Status.diverged,
    )
    return table[table["curves"].map(bool) | table["diverged"]]


def mean_curve(cells: Sequence[Sequence[DataFrame]]) -> DataFrame:
    """Return the mean curve over repetitions: `POINT`, at the epochs that every repetition evaluated.

    A mean over other repetitions at every epoch would move without any training having moved.

    Args:
        cells: for each repetition the curves of its runs, which count as one.
    """
    of_cells = [pd.concat(runs).groupby("epoch").mean() for runs in cells if runs]
    if not of_cells:
        return DataFrame(columns=list(POINT))
    by_epoch = pd.concat(of_cells).groupby("epoch")
    return by_epoch.mean()[by_epoch.size() == len(of_cells)].reset_index()
