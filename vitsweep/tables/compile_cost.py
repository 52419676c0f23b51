"""After how many steps a compilation has paid for itself."""

import numpy as np
from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables import names as col
from vitsweep.tables.formatting import number
from vitsweep.tables.names import cell_names

COLUMN = "steps_to_repay_compiling"
EAGER = "eager"


def with_repayment(cells: DataFrame) -> DataFrame:
    """Add the steps after which compiling has paid: its seconds by what a step is faster than eager.

    The eager step is that of the cell with the same settings but `compilation=eager`, on the same device.
    Without one, or where compiling made no step faster, the column is empty.
    """
    needed = {"compilation", "compile_seconds", "step_time_ms", "status"}
    if not needed <= set(cells):
        return cells.assign(**{COLUMN: np.nan})
    same = [c for c in col.spec_columns(cells) if not c.startswith("compilation")]
    keys = list(
        map(
            tuple,
            col.comparable(cells[[*same, *(c for c in ("device",) if c in cells)]]).to_numpy(),
        )
    )
    measured = cells["status"].eq(Status.measured) & cells["step_time_ms"].notna()
    eager = {
        key: time
        for key, choice, time, good in zip(
            keys, cells["compilation"], cells["step_time_ms"], measured, strict=True
        )
        if good and choice == EAGER
    }
    eager_ms = Series([eager.get(key, np.nan) for key in keys], cells.index, dtype=float)
    saved_ms = eager_ms - cells["step_time_ms"].astype(float)
    compiling = cells["compile_seconds"].astype(float).where(cells["compilation"].ne(EAGER))
    steps = np.ceil(1e3 * compiling.where(compiling > 0) / saved_ms.where(saved_ms > 0))
    return cells.assign(**{COLUMN: steps})


def repayments(cells: DataFrame, most: int = 3) -> list[str]:
    """Return a sentence for each cell that compiled: how long, and after how many steps it pays."""
    if not {"compilation", "compile_seconds", COLUMN} <= set(cells):
        return []
    names = dict(zip(cells["cell_id"], cell_names(cells), strict=True))
    compiled = cells[cells["compilation"].ne(EAGER) & cells["compile_seconds"].gt(0)]
    return [
        f"{names[row['cell_id']]} compiled for {number(row['compile_seconds'])} s before its window"
        + (
            f": it pays after {number(row[COLUMN], 2)} steps."
            if row[COLUMN] > 0
            else "; no eager cell of the same settings is slower, so that nothing repays it."
        )
        for _, row in compiled.head(most).iterrows()
    ]
