"""Throughput per accelerator, across kinds of accelerator."""

from collections.abc import Mapping
from typing import Any

from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables.names import varying
from vitsweep.tables.valid_runs import checked_cells, row_keys


def per_chip(cells: DataFrame, reference: Mapping[str, Any] | None = None) -> DataFrame:
    """Return throughput per rank relative to one reference row, slowest device first.

    Throughput per rank is that of one accelerator. Different devices
    never share a block, so the ratio has no interval; the spread of each row is shown.

    Args:
        cells: one row per cell and device.
        reference: columns and values that name the reference row; default: the baseline cell of
            the device with the lowest throughput.

    Raises:
        VitsweepError: no measured row, or more than one, fits the reference.
    """
    cells = checked_cells(
        cells, "images_per_second_per_rank", "baseline_cell_id", "sweep", "device", "claim"
    )
    measured = cells[cells["status"] == Status.measured].dropna(
        subset=["images_per_second_per_rank"]
    )
    row = _reference(measured, reference)
    columns = ["cell_id", "baseline_cell_id", "device", *varying(cells)]
    numbers = ["images_per_second_per_rank", "blocks", "throughput_spread"]
    rates = measured["images_per_second_per_rank"]
    order = rates.groupby(measured["device"].astype(str)).transform("min")
    return (
        measured.assign(_order=order)
        .sort_values(["_order", "images_per_second_per_rank"])
        .reindex(columns=[*columns, *numbers, "model_tflops_per_rank", "mfu"])
        .assign(
            relative_throughput=lambda t: (
                t["images_per_second_per_rank"] / row["images_per_second_per_rank"]
            ),
            reference=f"{row['device']}, {row['cell_id']}",
        )
    )


def _reference(measured: DataFrame, wanted: Mapping[str, Any] | None) -> Series:
    fitting = measured
    for column, value in (wanted or {}).items():
        if column not in measured:
            raise VitsweepError(f"`reference` names the column `{column}`, which these rows lack.")
        fitting = fitting[fitting[column] == value]
    if wanted is None:
        baselines = measured[row_keys(measured) == row_keys(measured, "baseline_cell_id")]
        fitting = (baselines if len(baselines) else measured).nsmallest(
            1, "images_per_second_per_rank"
        )
    if len(fitting) != 1:
        raise VitsweepError(
            f"The reference must name one measured row; {len(fitting)} rows fit {dict(wanted or {})}."
        )
    return fitting.iloc[0]
