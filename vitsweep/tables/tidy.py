"""Types of a loaded table: ordered categories, numbers, flags; and one device per comparison."""

import re
import warnings

import numpy as np
import pandas as pd
from pandas import CategoricalDtype, DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import Status
from vitsweep.tables import columns as col
from vitsweep.tables.cells import typed
from vitsweep.tables.columns import in_menu_order

MEASURED_NAME = re.compile(r"_(ms|us|ns|gib|mib|gb|bytes|per_second|tflops|joules|watts|hours)$")
"""Endings of the names of measured quantities."""


class UnknownUnitWarning(UserWarning):
    """A column has the name of a measured quantity but is not defined in `results.metrics.METRICS`."""


def tidy(table: DataFrame) -> DataFrame:
    """Return the table with choices as ordered categories, metrics as numbers, flags as booleans.

    Metrics that are not finite are missing.

    Raises:
        VitsweepError: a metric holds text.
    """
    return table.pipe(check_units).pipe(typed).pipe(finite).pipe(ordered).copy()  # in one piece


def finite(table: DataFrame) -> DataFrame:
    """Replace infinite metrics by missing values."""
    metrics = col.metric_columns(table)
    return table.assign(**table[metrics].replace([np.inf, -np.inf], np.nan)) if metrics else table


def ordered(table: DataFrame) -> DataFrame:
    """Make technique, model and status columns categories in the order of `columns.ORDER`."""
    groups = [c for c in (*col.CHOICES, "status") if c in table]
    known = {c: table[c].dropna().astype(str) for c in groups}
    types = {
        c: CategoricalDtype(in_menu_order(c, v.unique()), ordered=True) for c, v in known.items()
    }
    return table.astype(types)


def check_units(table: DataFrame) -> DataFrame:
    """Refuse metrics that are not numbers, and warn of columns without a defined unit."""
    for column in col.metric_columns(table):
        try:
            pd.to_numeric(table[column])
        except (ValueError, TypeError) as error:
            unit = METRICS[column].unit
            raise VitsweepError(
                f"Column `{column}` must hold numbers in {unit}: {error}."
            ) from error
    unknown = [c for c in col.environment_columns(table) if MEASURED_NAME.search(c)]
    if unknown:
        text = f"no unit is defined for {', '.join(unknown)}: add them to results/metrics.py"
        warnings.warn(text, UnknownUnitWarning, stacklevel=2)
    return table


def one_device(table: DataFrame, mixed_hardware: bool = False) -> DataFrame:
    """Return the table if its measured rows ran on one kind of device, or with `mixed_hardware`.

    Raises:
        VitsweepError: rows of several devices would be compared.
    """
    measured = table[table["status"] == Status.measured]
    devices = measured["device"].dropna().unique().tolist() if "device" in table else []
    if len(devices) > 1 and not mixed_hardware:
        raise VitsweepError(
            f"These rows ran on different devices ({', '.join(map(str, devices))}), so their "
            "difference is not due to the technique. Select one (`.query('device == ...')`), or allow "
            "it with `mixed_hardware=True`."
        )
    return table


def one_device_each(table: DataFrame, mixed_hardware: bool = False) -> DataFrame:
    """Return the table if the cells of each baseline ran on one kind of device; see `one_device`.

    Raises:
        VitsweepError: cells of one baseline ran on several devices.
    """
    for _, group in table.groupby("baseline_cell_id", sort=False):
        one_device(group, mixed_hardware)
    return table
