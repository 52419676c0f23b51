"""Runs of different code: only those of a cell's newest code count, and codes are never mixed.

Records name the code that measured them in `code_hash` (see `vitsweep.execution.code_hash`); the
empty hash stands for records from before they did.
"""

from collections.abc import Mapping

from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.status import in_order

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
