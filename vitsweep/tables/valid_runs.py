"""The status of a cell over all its runs, and which runs count."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from pandas import DataFrame, Index, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import COLUMNS, METRICS, Metrics, known_metrics
from vitsweep.results.record import Status

DISQUALIFYING = (Status.wrong, Status.diverged)
"""The throughput of a cell whose results are wrong does not count."""


def in_order(runs: DataFrame) -> DataFrame:
    """Return the runs oldest first, by `started_at` where it is known, else as they were given."""
    if "started_at" not in runs:
        return runs
    return runs.sort_values("started_at", kind="stable", na_position="first")


def final_status(runs: DataFrame) -> DataFrame:
    """Return one row per cell: `cell_id, status, reason, failed_rank, attempt`.

    A cell is `measured` when it has a measured run and its latest run did not end `wrong` or
    `diverged`; otherwise it has the status of its latest run. So a run that is killed in the fourth
    block does not discard three good blocks, and a technique that was `wrong` and then repaired is
    measured again as soon as a newer run is.
    """
    ordered = in_order(runs)
    latest = ordered.groupby("cell_id", sort=False, observed=True).tail(1).set_index("cell_id")
    measured = ordered[ordered["status"] == Status.measured]
    good = measured.groupby("cell_id", sort=False, observed=True).tail(1).set_index("cell_id")
    stands = good.index.difference(latest.index[latest["status"].isin(DISQUALIFYING)])
    columns = [c for c in ("status", "reason", "failed_rank", "attempt") if c in runs]
    rows = latest[columns].copy()
    rows.loc[stands] = good.loc[stands, columns]
    return rows.reset_index()


def counted(runs: DataFrame) -> DataFrame:
    """Return the runs whose numbers count: measured in full, of cells whose status is `measured`.

    Where a cell was measured on several kinds of device, only the latest one counts: a median over
    two machines describes neither.
    """
    status = final_status(runs).set_index("cell_id")["status"]
    ended_well = runs["cell_id"].map(status) == Status.measured
    good = runs[ended_well & (runs["status"] == Status.measured) & ~is_look(runs)]
    if "device" not in good:
        return good
    latest = in_order(good).groupby("cell_id", observed=True)["device"].last()
    elsewhere = good["device"].notna() & (good["device"] != good["cell_id"].map(latest))
    return good[~elsewhere]


def is_look(runs: DataFrame) -> Series:
    """Return which runs are looks: one short run of a cell, to tell whether it is worth its blocks."""
    if "look" not in runs:
        return Series(False, runs.index)
    return runs["look"].eq(True).fillna(False).astype(bool)


# Runs of different code: only those of a cell's newest code count, and codes are never mixed.
#
# Records name the code that measured them in `code_hash` (see `vitsweep.execution.code_hash`); the
# hash is empty where a record has none.


CODE = "code_hash"
EARLIER = "\x1fcode "
"""Between the id of a baseline and the earlier code of which its runs are kept apart."""


def newest_code(runs: DataFrame) -> DataFrame:
    """Return the runs of each cell by its newest code: the code of its latest run.

    A cell that was measured in several sweeps or on several devices is judged in each by itself.
    """
    keep = _is_newest(runs)
    return runs if keep is None else runs[keep]


def by_code(
    runs: DataFrame, baselines: Mapping[str, str | None]
) -> tuple[DataFrame, dict[str, str | None]]:
    """Keep the runs of newest code, and those of earlier code that cells are still compared with.

    Where a baseline was measured anew after its code changed, a cell that was not is compared with
    the earlier runs of the baseline, of the blocks that they share.

    Returns:
        The runs, and the baselines. A baseline that is needed as an earlier code measured it is a
        cell of its own there, with `EARLIER` in its id.
    """
    keep = _is_newest(runs)
    if keep is None:
        return runs, dict(baselines)
    ordered = in_order(runs[runs["status"] == Status.measured])
    codes = _codes(ordered)
    newest = keep.reindex(ordered.index)
    at = {
        (str(cell), str(block)): (code, is_newest)
        for cell, block, code, is_newest in zip(
            ordered["cell_id"], ordered["block"], codes, newest, strict=True
        )
    }
    of_cell: dict[str, str | None] = dict(baselines)
    earlier: dict[tuple[str, str], str] = {}
    for (cell, block), (_, is_newest) in at.items():  # the latest shared block decides
        base = baselines.get(cell)
        if not is_newest or not base or base == cell or (base, block) not in at:
            continue
        code, is_newest_base = at[base, block]
        if is_newest_base:
            of_cell[cell] = base
        else:
            of_cell[cell] = earlier[base, code] = f"{base}{EARLIER}{code}"
    of_cell |= {alias: alias for alias in earlier.values()}
    ids = [
        str(cell) if is_newest else earlier.get((str(cell), code), "")
        for cell, code, is_newest in zip(runs["cell_id"], _codes(runs), keep, strict=True)
    ]
    apart = runs.assign(cell_id=ids)
    return apart[apart["cell_id"] != ""], of_cell


def is_earlier(cell_ids: Series) -> Series:
    """Tell which ids stand for a baseline as an earlier code measured it."""
    return cell_ids.astype(str).str.contains(EARLIER, regex=False)


def _is_newest(runs: DataFrame) -> Series | None:
    """Return which runs are of their cell's newest code; None where every cell has one code only."""
    if CODE not in runs or runs.empty:
        return None
    where = [c for c in ("cell_id", "sweep", "device_type") if c in runs]
    table = runs[where].fillna("").assign(code=_codes(runs))
    if not (table.groupby(where)["code"].nunique() > 1).any():
        return None
    latest = table.loc[in_order(runs).index].groupby(where)["code"].last().rename("newest")
    newest = table.join(latest, on=where)["newest"]
    return table["code"] == newest


def _codes(runs: DataFrame) -> Series:
    return runs[CODE].astype(object).where(runs[CODE].notna(), "").astype(str)


# What every table function checks first: the columns it needs, numbers that are numbers, row keys.
#
# The key of a measured row is (cell_id, sweep, device): the same cell measured on two machines, or in
# two sweeps, is two rows, and each is compared with the baseline of its own sweep and device only.


KEY = ("cell_id", "sweep", "device")
"""Columns that identify a measured row."""

SEPARATOR = "\x1f"
"""Between the parts of a key; it occurs in no name."""


def checked_cells(cells: DataFrame, *optional: str) -> DataFrame:
    """Return a table of cells with its numbers checked and every column of `optional` present.

    Numbers that are not finite, and throughput, time or speedup that is not above zero, become
    missing. Rows that occur twice are kept once.

    Args:
        cells: one row per cell, sweep and device.
        optional: columns that the caller reads; those that the table lacks are added, empty.

    Raises:
        VitsweepError: `cell_id` or `status` is missing, a row has no `cell_id`, a numeric column
            holds text, or one row of a sweep and device has two different throughputs.
    """
    table = _checked(cells, ("cell_id", "status"), optional)
    if table["cell_id"].is_unique:
        return table
    keys, numbers = row_keys(table), table.get("images_per_second")
    if numbers is not None and (numbers.groupby(keys.to_numpy()).nunique() > 1).any():
        several = table.loc[numbers.groupby(keys.to_numpy()).transform("nunique") > 1, "cell_id"]
        raise VitsweepError(
            f"Column `images_per_second`: cell {several.iloc[0]} has two values in one sweep on one "
            "device; a row is one cell, sweep and device. Load each sweep folder once."
        )
    return table[~keys.duplicated(keep="last")]


def checked_runs(runs: DataFrame, *optional: str) -> DataFrame:
    """Return a table of runs with its numbers checked; see `checked_cells`.

    Raises:
        VitsweepError: as `checked_cells`, or a measured run has no `block`.
    """
    table = _checked(
        runs, ("cell_id", "status"), ("sweep", "block", "images_per_second", *optional)
    )
    measured = table["status"] == Status.measured
    if table.loc[measured, "block"].isna().any():
        raise VitsweepError(
            "Column `block` must name the block of every measured run: only runs of one block are "
            f"compared; {int(table.loc[measured, 'block'].isna().sum())} have none."
        )
    if "run_id" in table and table["run_id"].notna().all():
        same = [c for c in ("run_id", "cell_id", "sweep", "device", "started_at") if c in table]
        return table[~table.duplicated([*same, "images_per_second"])]
    return table


def _checked(table: DataFrame, required: Iterable[str], optional: Iterable[str]) -> DataFrame:
    lacking = [c for c in required if c not in table]
    if lacking and len(table):
        raise VitsweepError(
            f"Column `{lacking[0]}` is missing: every row must have "
            f"{' and '.join(f'`{c}`' for c in required)}. Load records with `vitsweep.tables.load`."
        )
    if "cell_id" in table and table["cell_id"].isna().any():
        raise VitsweepError(
            "Column `cell_id` must name the cell of every row; "
            f"{int(table['cell_id'].isna().sum())} of {len(table)} rows have none."
        )
    metrics = known_metrics(table)
    numbers = {c: n for c in table if (n := _numbers(table[c], str(c), metrics)) is not None}
    absent = [c for c in (*lacking, *optional) if c not in table]
    filled = {c: Series(missing_value(c), table.index, dtype=_dtype(c)) for c in absent}
    return (
        table.assign(**{str(c): v for c, v in numbers.items()}, **filled)
        if numbers or filled
        else table
    )


def missing_value(column: str) -> float | str | None:
    """Return what stands in a column that a table does not have."""
    known = COLUMNS.get(column)
    return np.nan if _is_number(column) else known.missing if known else None


def _dtype(column: str) -> type:
    return float if _is_number(column) else object


def _is_number(column: str, metrics: Metrics = METRICS) -> bool:
    return column in metrics or (column in COLUMNS and COLUMNS[column].numbers)


def _numbers(column: Series, name: str, metrics: Metrics) -> Series | None:
    """Return the checked numbers of a numeric column; None where nothing has to change."""
    if not _is_number(name, metrics):
        return None
    values = column
    if pd.api.types.is_complex_dtype(values):
        raise VitsweepError(f"Column `{name}` must hold real numbers; it holds complex ones.")
    if not pd.api.types.is_numeric_dtype(values):
        values = pd.to_numeric(values, errors="coerce")
        text = values.isna() & column.notna()
        if text.any():
            rule = f"in {metrics[name].unit}" if name in metrics else ""
            raise VitsweepError(
                f"Column `{name}` must hold numbers {rule}".rstrip()
                + f"; `{column[text].iloc[0]}` of row {text.argmax()} is none."
            )
    plain = values.to_numpy(float, na_value=np.nan)
    bad = ~np.isfinite(plain) & ~np.isnan(plain)
    is_positive = (metrics[name] if name in metrics else COLUMNS[name]).positive
    bad |= plain <= 0 if is_positive else False
    if bad.any():
        return values.mask(Series(bad, values.index))
    return None if values is column else values


def row_keys(table: DataFrame, cell: str = "cell_id") -> Index:
    """Return the key (cell, sweep, device) of every row as one text.

    Args:
        table: cells or runs.
        cell: column with the cell: `baseline_cell_id` gives the keys of the rows' baselines.
    """
    sweep, device = (text(table, c) for c in KEY[1:])
    return Index(text(table, cell) + SEPARATOR + sweep + SEPARATOR + device, dtype=object)


def of_baseline(cells: DataFrame, column: str) -> Series:
    """Return for every row the value of `column` in the row of its baseline, missing if there is none.

    The baseline of a row is the one of its own sweep and device.
    """
    known = Series(cells[column].to_numpy(), row_keys(cells))
    known = known[~known.index.duplicated(keep="last")]
    return Series(known.reindex(row_keys(cells, "baseline_cell_id")).to_numpy(), cells.index)


def separated(
    runs: DataFrame, baselines: Mapping[str, str | None]
) -> tuple[DataFrame, dict[str, str | None], dict[str, str]]:
    """Give a cell one id per sweep and device in which it was measured, where there are several.

    Runs of earlier code are left out, see `by_code`.

    Runs that were not measured, on a device on which the cell never was, stay with its latest
    measured ones of the same sweep.

    Returns:
        The runs, the baselines of the new ids, and new id -> cell id (empty where nothing changed:
        no cell was measured in two sweeps, on two devices or by two states of the code).
    """
    runs, baselines = by_code(runs, baselines)
    earlier = {
        str(b): str(b).partition(SEPARATOR)[0] for b in baselines.values() if b and EARLIER in b
    }
    places = _places(runs)
    if places is None:
        return runs, dict(baselines), earlier
    ids = runs["cell_id"].astype(str)
    keys = ids + SEPARATOR + places
    own = dict(zip(keys, ids, strict=True))
    of_key = {
        key: None if _none(base := baselines.get(cell)) else f"{base}{key[len(cell) :]}"
        for key, cell in own.items()
    }
    measured = set(ids)
    lost = {cell: base for cell, base in baselines.items() if cell not in measured}
    bases = {str(b): str(b).partition(SEPARATOR)[0] for b in of_key.values() if b is not None}
    original = {str(key): str(earlier.get(cell, cell)) for key, cell in own.items()}
    return runs.assign(cell_id=keys), of_key | lost, bases | original


def _places(runs: DataFrame) -> Series | None:
    """Return `sweep, device` of the row that each run belongs to; None for one sweep and device."""
    where = {c: text(runs, c) for c in ("sweep", "device")}
    measured = runs["status"] == Status.measured
    if where["sweep"].nunique() < 2 and where["device"][measured].nunique() < 2:
        return None
    seen = DataFrame({"cell": runs["cell_id"].astype(str), **where}, index=runs.index)
    if "started_at" in runs:
        order = runs["started_at"].astype(str).sort_values(kind="stable").index
        seen = seen.loc[order]
    good = seen[measured.reindex(seen.index)]
    latest = good.groupby(["cell", "sweep"])["device"].last()
    own = set(good.itertuples(index=False, name=None))
    device = [
        row[2] if row in own else latest.get(row[:2], "")
        for row in seen.itertuples(index=False, name=None)
    ]
    places = seen["sweep"] + SEPARATOR + Series(device, seen.index, dtype=object)
    return places.reindex(runs.index)


def one_device(table: DataFrame, mixed_hardware: bool = False) -> DataFrame:
    """Return the table if its measured rows ran on one kind of device, or with `mixed_hardware`.

    Raises:
        VitsweepError: rows of several devices would be compared.
    """
    measured = table[table["status"] == Status.measured]
    devices = measured["device"].dropna().unique().tolist() if "device" in table else []
    if len(devices) > 1 and not mixed_hardware:
        _refuse(devices)
    return table


def one_device_each(table: DataFrame, mixed_hardware: bool = False) -> DataFrame:
    """Return the table if every cell was measured on the device of its baseline; see `one_device`.

    A cell whose baseline was measured on several devices, its own among them, is fine: it is
    compared on its own device.

    Raises:
        VitsweepError: a cell's baseline was measured on other devices only.
    """
    measured = table[table["status"] == Status.measured]
    if mixed_hardware or "device" not in measured or measured["device"].nunique() < 2:
        return table
    keys = set(row_keys(measured))
    for _, group in measured.groupby(["baseline_cell_id", "sweep"], observed=True, sort=False):
        base = measured[
            (measured["cell_id"] == group["baseline_cell_id"].iloc[0])
            & (measured["sweep"].astype(str) == str(group["sweep"].iloc[0]))
        ]
        alone = ~row_keys(group, "baseline_cell_id").isin(keys)
        if len(base) and alone.any():
            devices = [*base["device"].dropna().unique(), *group["device"][alone].dropna().unique()]
            _refuse(list(dict.fromkeys(devices)))
    return table


def _refuse(devices: Sequence[Any]) -> NoReturn:
    raise VitsweepError(
        f"These rows ran on different devices ({', '.join(map(str, devices))}), so their "
        "difference is not due to the technique. Select one (`.query('device == ...')`), or allow "
        "it with `mixed_hardware=True`."
    )


def text(table: DataFrame, column: str) -> Series:
    """Return a column as text, the empty text where it or its value is missing."""
    if column not in table:
        return Series("", table.index, dtype=object)
    return table[column].astype(object).where(table[column].notna(), "").astype(str)


def _none(value: Any) -> bool:
    return not isinstance(value, str) or not value
