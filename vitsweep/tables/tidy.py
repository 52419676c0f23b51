"""Types of a loaded table: ordered categories, numbers, flags; and one device per comparison."""

import re
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pandas as pd
from pandas import CategoricalDtype, DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import known_metrics
from vitsweep.results.record import Status
from vitsweep.tables import names as col
from vitsweep.tables.cells import typed
from vitsweep.tables.names import in_menu_order
from vitsweep.tables.valid_runs import row_keys

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
            unit = known_metrics(table)[column].unit
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
