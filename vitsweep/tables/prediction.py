"""Predicted metrics beside measured ones."""

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import Status
from vitsweep.tables.cost import peaks_gib
from vitsweep.tables.formatting import (
    Column,
    count,
    missing,
    number,
    text_columns,
    values,
    with_interval,
)
from vitsweep.tables.names import cell_names, varying
from vitsweep.tables.valid_runs import checked_cells

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


def predictions_text(cells: DataFrame) -> DataFrame:
    """Return the predictions made before the cells ran beside what was measured, as text.

    One row per measured cell that has a prediction; errors are predicted / measured - 1.
    """
    found = _with_step_times(cells.assign(name=cell_names(cells), peak=peaks_gib(cells)))
    predicted = {c: _numbers(found, f"{PREFIX}{c}") for c in ("step_time_ms", "peak_gib")}
    errors = {
        "step_time_error": predicted["step_time_ms"] / _numbers(found, "step_time_ms") - 1,
        "peak_error": predicted["peak_gib"] / found["peak"] - 1,
    }
    return text_columns(found.assign(**errors), _SHOWN)


def _numbers(table: DataFrame, column: str) -> Series:
    values = table.get(column, Series(np.nan, table.index))
    return pd.to_numeric(values, errors="coerce").astype(float)


def _signed(error: float) -> str:
    return "" if missing(error) else f"{100 * error:+.0f} %"


_SHOWN: dict[str, Column] = {
    "cell": values("name"),
    "step ms": values("step_time_ms", number),
    "predicted": with_interval(
        "predicted_step_time_ms", number, number, "predicted_step_time_{}_ms"
    ),
    "error": values("step_time_error", _signed),
    "peak GiB": values("peak", number),
    "predicted peak": values("predicted_peak_gib", number),
    "peak error": values("peak_error", _signed),
}


def prediction_sentence(cells: DataFrame) -> str:
    """Return how far predicted step times were off, and how often their intervals held; or ""."""
    found = _with_step_times(cells)
    if found.empty:
        return ""
    measured = found["step_time_ms"].astype(float)
    errors = (found["predicted_step_time_ms"].astype(float) / measured - 1).abs()
    text = (
        f"Step times of {count(len(found), 'cell')} were predicted before they ran. Median error: "
        f"{100 * errors.median():.0f} %; 90th percentile: {100 * errors.quantile(0.9):.0f} %"
    )
    ends = ["predicted_step_time_low_ms", "predicted_step_time_high_ms"]
    if not set(ends) <= set(found):
        return f"{text}."
    low, high = (pd.to_numeric(found[end], errors="coerce") for end in ends)
    held = int(((measured >= low) & (measured <= high)).sum())
    return f"{text}; {held} of {len(found)} lie in their 80 % intervals."


def _with_step_times(cells: DataFrame) -> DataFrame:
    columns = ["predicted_step_time_ms", "step_time_ms"]
    if not set(columns) <= set(cells):
        return cells.iloc[:0]
    numbers = cells[columns].apply(pd.to_numeric, errors="coerce")
    return cells[(cells["status"] == Status.measured) & (numbers > 0).all(axis=1)]
