"""The status of a cell over all its runs, and which runs count."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from pandas import DataFrame, Index, Series, factorize

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import COLUMNS, METRICS, Metrics, known_metrics
from vitsweep.results.record import CHOOSING, SCREENING, Status

DISQUALIFYING = (Status.wrong, Status.diverged)
"""The throughput of a cell whose results are wrong does not count."""


def in_order(runs: DataFrame) -> DataFrame:
    """Return the runs oldest first, by `started_at` where it is known, else as they were given."""
    if "started_at" not in runs:
        return runs
    known = runs["started_at"].notna()
    if known.is_monotonic_increasing and runs.loc[known, "started_at"].is_monotonic_increasing:
        return runs
    return runs.sort_values("started_at", kind="stable", na_position="first")


def _in_order(runs: DataFrame, *columns: str) -> DataFrame:
    """Return some columns oldest first: to sort a hundred takes a hundred times as long."""
    return in_order(runs[[*columns, *(c for c in ("started_at",) if c in runs)]])


def final_status(runs: DataFrame, by: str = "cell_id") -> DataFrame:
    """Return one row per cell: `<by>, status, reason, failed_rank, attempt`.

    A cell is `measured` when it has a measured run and its latest run did not end `wrong` or
    `diverged`; otherwise it has the status of its latest run. So a run that is killed in the fourth
    block does not discard three good blocks, and a technique that was `wrong` and then repaired is
    measured again as soon as a newer run is.

    Args:
        runs: one row per run.
        by: column that says which runs belong together: `cell_id`, or the `row` of `keyed`.
    """
    columns = [c for c in ("status", "reason", "failed_rank", "attempt") if c in runs]
    ordered = _in_order(runs, by, *columns)
    codes, keys = factorize(ordered[by])
    has_key = codes >= 0
    measured = ordered["status"].eq(Status.measured).to_numpy(bool, na_value=False)
    disqualified = ordered["status"].isin(DISQUALIFYING).to_numpy(bool)
    latest, good = np.full((2, len(keys)), -1)
    for last, counted in ((latest, has_key), (good, has_key & measured)):
        rows = np.flatnonzero(counted)
        last[codes[rows]] = rows  # of rows of one key the last stays
    stands = np.where((good >= 0) & ~disqualified[latest], good, latest)
    return ordered[[by, *columns]].iloc[stands[np.argsort(latest)]].reset_index(drop=True)


def valid_runs(runs: DataFrame, by: str = "cell_id", known: DataFrame | None = None) -> DataFrame:
    """Return the runs whose numbers count: measured in full, of cells whose status is `measured`.

    Where a cell was measured on several kinds of device, only the latest one counts: a median over
    two machines describes neither.

    Args:
        runs: one row per run.
        by: see `final_status`.
        known: its table for these runs, where there is one.
    """
    status = (final_status(runs, by) if known is None else known).set_index(by)["status"]
    ended_well = runs[by].map(status) == Status.measured
    good = runs[ended_well & (runs["status"] == Status.measured) & ~is_screening(runs)]
    if "device" not in good:
        return good
    latest = _in_order(good, by, "device").groupby(by, observed=True)["device"].last()
    elsewhere = good["device"].notna() & (good["device"] != good[by].map(latest))
    return good[~elsewhere] if elsewhere.any() else good


def is_screening(runs: DataFrame) -> Series:
    """Return which runs tell whether a cell is worth its blocks, and enter no interval.

    Screening runs are one short run of a cell each; others chose which cells run on.
    """
    if "purpose" not in runs:
        return Series(False, runs.index)
    return runs["purpose"].isin([SCREENING, CHOOSING])


# Runs of different code: only those of a cell's newest code count, and codes are never mixed.
#
# Records name the code that measured them in `code_hash` (see `vitsweep.execution.code_hash`), and the
# version of torch; either is empty where a record has none.


CODE = "code_hash"


def newest_code(runs: DataFrame) -> DataFrame:
    """Return the runs of each cell by its newest code: the code of its latest run.

    A cell that was measured in several sweeps or on several devices is judged in each by itself.
    """
    keep = _is_newest(runs)
    return runs if keep is None else runs[keep]


def _code(runs: DataFrame) -> Series:
    """Return the state of the code of each run: the hash, and the minor version of torch."""
    version = text(runs, "torch").str.extract(r"^(\d+\.\d+|.*)", expand=False)
    return text(runs, CODE) + version.where(version == "", " torch " + version)


def _is_newest(runs: DataFrame) -> Series | None:
    """Return which runs are of their cell's newest code; None where every cell has one code only."""
    if not {CODE, "torch"} & {*runs} or runs.empty:
        return None
    where = [c for c in ("cell_id", "sweep", "device_type") if c in runs]
    table = runs[where].fillna("").assign(code=_code(runs))
    if not (table.groupby(where)["code"].nunique() > 1).any():
        return None
    latest = table.loc[_in_order(runs).index].groupby(where)["code"].last().rename("newest")
    newest = table.join(latest, on=where)["newest"]
    return table["code"] == newest


# What every table function checks first: the columns it needs, numbers that are numbers, row keys.
#
# The key of a measured row is (cell_id, sweep, device): the same cell measured on two machines, or in
# two sweeps, is two rows, and each is compared with the baseline of its own sweep and device only.


KEY = ("cell_id", "sweep", "device")
"""Columns that identify a measured row."""

ROW = (*KEY, CODE)
"""With the state of the code: what the runs of one row have in common."""


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
    table = checked(cells, ("cell_id", "status"), optional)
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
    """Return a table of runs, oldest first, with its numbers checked; see `checked_cells`.

    Raises:
        VitsweepError: as `checked_cells`, or a measured run has no `block`.
    """
    table = in_order(
        checked(runs, ("cell_id", "status"), ("sweep", "block", "images_per_second", *optional))
    )
    measured = table["status"] == Status.measured
    if table.loc[measured, "block"].isna().any():
        raise VitsweepError(
            "Column `block` must name the block of every measured run: only runs of one block are "
            f"compared; {int(table.loc[measured, 'block'].isna().sum())} have none."
        )
    if "run_id" in table and table["run_id"].notna().all():
        same = [c for c in ("run_id", "cell_id", "sweep", "device", "started_at") if c in table]
        again = table.duplicated([*same, "images_per_second"])
        return table[~again] if again.any() else table
    return table


def checked(
    table: DataFrame, required: Iterable[str] = (), optional: Iterable[str] = ()
) -> DataFrame:
    """Return a table with its numbers checked, see `checked_cells`."""
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
    numeric = [c for c in table if _is_number(str(c), metrics)]
    numbers = {c: n for c in numeric if (n := _numbers(table[c], str(c), metrics)) is not None}
    absent = [c for c in (*lacking, *optional) if c not in table]
    filled = {
        c: Series(np.nan, table.index, dtype=float)
        if _is_number(c)
        else Series(COLUMNS[c].missing if c in COLUMNS else None, table.index, dtype=object)
        for c in absent
    }
    if not (numbers or filled):
        return table
    return table.assign(**{str(c): v for c, v in numbers.items()}, **filled)


def _is_number(column: str, metrics: Metrics = METRICS) -> bool:
    return column in metrics or (column in COLUMNS and COLUMNS[column].numbers)


def _numbers(column: Series, name: str, metrics: Metrics) -> Series | None:
    """Return the checked numbers of a numeric column; None where nothing has to change."""
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
    """Return the key (cell, sweep, device) of every row.

    Args:
        table: cells or runs.
        cell: column with the cell: `baseline_cell_id` gives the keys of the rows' baselines.
    """
    columns = (text(table, c) for c in (cell, *KEY[1:]))
    return Index(list(zip(*columns, strict=True)), dtype=object, tupleize_cols=False)


@dataclass(frozen=True, eq=False)
class KeyedRuns:
    """Runs with the number of the measured row that each belongs to.

    Attributes:
        runs: of newest code, and those of earlier code that cells are still compared with; `row` is
            the number.
        rows: by that number the columns of `ROW`, `baseline_cell_id`, `baseline` (its number, NaN for
            none), `others`: blocks with another code of the baseline, which are left out, `older`: blocks
            of older code of the cell itself, left out too, `is_earlier`: a baseline as an earlier code
            measured it, `is_listed`: of cells that have runs or a baseline.
        is_one_place: all runs are of one sweep on one device.
    """

    runs: DataFrame
    rows: DataFrame
    is_one_place: bool

    @cached_property
    def baselines(self) -> dict[int, int | None]:
        """Row -> the row of its baseline."""
        known = self.rows["baseline"]
        return {n: None if b != b else int(b) for n, b in enumerate(known)}

    @cached_property
    def status(self) -> DataFrame:
        """The status of each row, see `final_status`."""
        return final_status(self.runs, "row")

    @cached_property
    def valid(self) -> DataFrame:
        """The runs whose numbers count, see `valid_runs`."""
        return valid_runs(self.runs, "row", self.status)

    def numbers(self, cells: DataFrame) -> Series:
        """Return the number of the row of each cell of a table; NaN for one without."""
        rows = self.rows[~self.rows["is_earlier"]]
        if self.is_one_place:
            known = Series(rows.index, rows["cell_id"])
            return cells["cell_id"].astype(object).map(known[~known.index.duplicated()])
        known = Series(rows.index, row_keys(rows))
        return Series(known.reindex(row_keys(cells)).to_numpy(), cells.index)


def keyed(runs: DataFrame, baselines: Mapping[str, str | None]) -> KeyedRuns:
    """Number the measured rows of a table of runs: one per cell, sweep, device and state of the code.

    Runs that were not measured, on a device on which the cell never was, belong to its latest
    measured row of the same sweep. Only the runs of a cell's newest code count. Where its baseline was
    measured by several codes, the cell is compared with the one that measured the latest block
    which both share, and with no other: a ratio never mixes two states of the code of one side.

    Args:
        runs: one row per run, as `checked_runs` returns them.
        baselines: cell -> its baseline cell, or None.
    """
    if not runs.index.is_unique:
        runs = runs.reset_index(drop=True)
    at, is_one_place = _places(runs)
    newest = _is_newest(runs)
    at[CODE], at["newest"] = _code(runs), True if newest is None else newest
    own = at[at["newest"]]
    own = own.assign(**{CODE: own.groupby([*KEY], sort=False)[CODE].transform("last")})
    at.loc[own.index, CODE] = own[CODE]
    code_of = dict(zip(_tuples(own, KEY), own[CODE], strict=True))
    of_pairs = _codes_of_baselines(at, runs, baselines) if newest is not None else {}
    number = {key: n for n, key in enumerate(dict.fromkeys(_tuples(own, ROW)))}
    place = _tuples(at, KEY[1:])[0] if is_one_place and len(at) else ("", "")
    with_runs = {key[0] for key in number}
    for cell in (c for c in baselines if c not in with_runs):
        number[cell, *place, ""] = len(number)
    counted = (runs["status"] == Status.measured) & ~is_screening(runs) & ~at["newest"]
    blocks = at.assign(block=runs["block"])[counted].groupby([*KEY])["block"]
    older = blocks.nunique().to_dict()
    listed, facts = len(number), []
    for key in list(number):
        base, base_key, others = baselines.get(key[0]), None, 0
        if isinstance(base, str) and base:
            code, others = of_pairs.get(key[:3], (code_of.get((base, *key[1:3]), ""), 0))
            base_key = number.setdefault((base, *key[1:3], code), len(number))
        facts.append((base, base_key, others, older.get(key[:3], 0)))
    facts += [(key[0], n, 0, 0) for key, n in list(number.items())[listed:]]
    rows = DataFrame(list(number), columns=list(ROW), dtype=object).join(
        DataFrame(facts, columns=["baseline_cell_id", "baseline", "others", "older"])
    )
    is_code = [code_of.get(key[:3], key[3]) == key[3] for key in number]
    rows = rows.astype({"baseline": float}).assign(
        is_earlier=np.logical_not(is_code), is_listed=rows.index < listed
    )
    row = Series([number.get(key) for key in _tuples(at, ROW)], runs.index, dtype=float)
    kept = row.notna()
    return KeyedRuns(runs[kept].assign(row=row[kept].astype(int)), rows, is_one_place)


def _tuples(table: DataFrame, columns: Sequence[str]) -> list[tuple[str, ...]]:
    return list(zip(*(table[c] for c in columns), strict=True))


def _codes_of_baselines(
    at: DataFrame, runs: DataFrame, baselines: Mapping[str, str | None]
) -> dict[tuple[str, ...], tuple[str, int]]:
    """Return for each cell, sweep, device the code of the baseline it is compared with.

    That of the latest block which both share; blocks measured in full decide before screening runs. Second:
    the number of blocks shared with another code.
    """
    good = at.assign(block=runs["block"], full=~is_screening(runs))[runs["status"] == "measured"]
    of_cell = {c: b for c, b in baselines.items() if b and b != c}
    variant = good[good["newest"]].assign(base=lambda t: t["cell_id"].map(of_cell))
    right = good.drop(columns="newest").rename(
        columns={"cell_id": "base", CODE: "code", "full": "both"}
    )
    shared = variant.dropna(subset="base").reset_index(drop=True).reset_index()
    shared = shared.merge(right, on=["base", *KEY[1:], "block"])
    shared = shared.assign(full=shared["full"] & shared["both"])
    shared = shared.sort_values(["full", "index"], kind="stable")
    found = {}
    for key, some in shared.groupby([*KEY], sort=False):
        code = str(some["code"].iloc[-1])
        others = some.loc[some["full"] & (some["code"] != code), "block"]
        found[tuple(map(str, key))] = (code, others.nunique())
    return found


def _places(runs: DataFrame) -> tuple[DataFrame, bool]:
    """Return `cell_id, sweep, device` of the row of each run, and whether there is one place only."""
    where = {c: text(runs, c) for c in KEY}
    seen = DataFrame(where, index=runs.index)
    measured = runs["status"] == Status.measured
    devices = seen.loc[measured, "device"].unique()
    if seen["sweep"].nunique() < 2 and len(devices) < 2:
        return seen.assign(device=devices[0] if len(devices) else ""), True
    good = seen[measured]
    latest = good.groupby(["cell_id", "sweep"])["device"].last()
    own = set(_tuples(good, KEY))
    seen["device"] = [k[2] if k in own else latest.get(k[:2], "") for k in _tuples(seen, KEY)]
    return seen, False


def one_device(table: DataFrame) -> DataFrame:
    """Return the table if its measured rows ran on one kind of device.

    Raises:
        VitsweepError: rows of several devices would be compared.
    """
    measured = table[table["status"] == Status.measured]
    devices = measured["device"].dropna().unique().tolist() if "device" in table else []
    if len(devices) > 1:
        _refuse(devices)
    return table


def one_device_each(table: DataFrame) -> DataFrame:
    """Return the table if every cell was measured on a device on which its baseline was too.

    Raises:
        VitsweepError: a cell's baseline was measured on other devices only.
    """
    measured = table[table["status"] == Status.measured]
    own, base = row_keys(measured), row_keys(measured, "baseline_cell_id")
    where = {key[:2]: key[2] for key in own}
    for key in base[~base.isin(own)]:
        if where.get(key[:2]):
            _refuse([where[key[:2]], key[2]])
    return table


def _refuse(devices: Sequence[Any]) -> NoReturn:
    raise VitsweepError(
        f"These rows ran on different devices ({', '.join(map(str, devices))}), so their "
        "difference is not due to the technique: select one (`.query('device == ...')`)."
    )


def peaks_gib(cells: DataFrame) -> Series:
    """Return the peak memory of the worst rank in GiB: allocated on a GPU, resident on CPU."""
    return numbers(cells, "peak_allocated_gib").fillna(numbers(cells, "peak_rss_gib"))


def numbers(table: DataFrame, column: str) -> Series:
    """Return a column as floats, `peak_gib` as `peaks_gib`; NaN where it has no number."""
    if column == "peak_gib":
        return peaks_gib(table)
    values = table.get(column, Series(np.nan, table.index))
    return pd.to_numeric(values, errors="coerce").astype(float)


def text(table: DataFrame, column: str) -> Series:
    """Return a column as text, the empty text where it or its value is missing."""
    if column not in table:
        return Series("", table.index, dtype=object)
    return table[column].astype(object).where(table[column].notna(), "").astype(str)
