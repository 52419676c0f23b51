"""Peak memory and hours per epoch."""

import numpy as np
import pandas as pd
from pandas import DataFrame, Series

from vitsweep.results.record import Status
from vitsweep.tables.names import varying_columns
from vitsweep.tables.valid_runs import checked_cells, of_baseline

IMAGENET_1K = 1_281_167
"""Training images of ImageNet-1k (ILSVRC 2012)."""


def peaks_gib(cells: DataFrame) -> Series:
    """Return the peak memory of the worst rank in GiB: allocated on a GPU, resident on CPU."""
    return numbers(cells, "peak_allocated_gib").fillna(numbers(cells, "peak_rss_gib"))


def numbers(table: DataFrame, column: str) -> Series:
    """Return a column as floats, `peak_gib` as `peaks_gib`; NaN where it has no number."""
    if column == "peak_gib":
        return peaks_gib(table)
    values = table.get(column, Series(np.nan, table.index))
    return pd.to_numeric(values, errors="coerce").astype(float)


def epoch_hours(cells: DataFrame, images: int = IMAGENET_1K) -> DataFrame:
    """Return hours per epoch of `images`, beside the baseline's, for every measured cell.

    hours = images / throughput / 3600. The interval is the baseline's hours divided by the ends of
    the speedup, so it contains the noise of the ratio alone.
    """
    cells = checked_cells(
        cells, "images_per_second", "baseline_cell_id", "speedup", "speedup_low", "speedup_high"
    )
    measured = cells[cells["status"] == Status.measured]
    hours = images / measured["images_per_second"].astype(float) / 3600
    base = of_baseline(measured.assign(_hours=hours), "_hours")
    shown = ["throughput_spread", "blocks", "claim", "sweep", "device"]
    columns = [
        "cell_id", *varying_columns(cells), "images_per_second", "baseline_cell_id",
        *(c for c in shown[:2] if c in measured), "speedup", *(c for c in shown[2:] if c in measured),
    ]  # fmt: skip
    return (
        measured[list(dict.fromkeys(columns))]
        .assign(
            epoch_hours=hours,
            epoch_hours_low=base / measured["speedup_high"].astype(float),
            epoch_hours_high=base / measured["speedup_low"].astype(float),
            baseline_epoch_hours=base,
        )
        .sort_values("epoch_hours")
    )
