"""Predicted metrics beside measured ones."""

import pandas as pd
from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import Status
from vitsweep.tables.checks import checked_cells
from vitsweep.tables.columns import varying

PREFIX = "predicted_"


def predicted_vs_measured(cells: DataFrame) -> DataFrame:
    """Return one row per cell and predicted metric: predicted, measured, ratio, error.

    A prediction is a column `predicted_<metric>`. `ratio` is predicted / measured; `error` the
    same minus 1, so 0.1 is 10 % too much. Cells that were not measured keep their prediction.
    """
    cells = checked_cells(cells)
    metrics = [m for m in METRICS if PREFIX + m in cells]
    columns = ["cell_id", *varying(cells), "status"]
    parts = [
        cells[columns].assign(
            metric=m,
            unit=METRICS[m].unit,
            predicted=_predicted(cells, PREFIX + m),
            measured=pd.to_numeric(cells[m]).where(cells["status"] == Status.measured)
            if m in cells
            else float("nan"),
        )
        for m in metrics
    ]
    if not parts:
        return DataFrame(
            columns=[*columns, "metric", "unit", "predicted", "measured", "ratio", "error"]
        )
    return (
        pd.concat(parts, ignore_index=True)
        .dropna(subset=["predicted"])
        .assign(ratio=lambda t: t["predicted"] / t["measured"], error=lambda t: t["ratio"] - 1)
    )


def _predicted(cells: DataFrame, column: str) -> Series:
    try:
        return pd.to_numeric(cells[column])
    except (ValueError, TypeError) as error:
        raise VitsweepError(f"Column `{column}` must hold numbers: {error}.") from error


def prediction_error(comparison: DataFrame) -> DataFrame:
    """Return per metric how many cells were compared, the median and the worst absolute error."""
    absolute = comparison.assign(absolute=comparison["error"].abs()).dropna(subset=["absolute"])
    return (
        absolute.groupby("metric", sort=False)["absolute"]
        .agg(num_cells="count", median_error="median", worst_error="max")
        .reset_index()
    )
