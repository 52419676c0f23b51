"""Throughput per chip, relative to one reference, by device."""

from matplotlib.figure import Figure
from pandas import DataFrame

from vitsweep.charts.style import NOTHING, Bars, Chart, first_group, labels, mixed
from vitsweep.results.record import Status
from vitsweep.tables.formatting import plain, ratio
from vitsweep.tables.names import varying_columns
from vitsweep.tables.scaling import cores_per_rank
from vitsweep.tables.sentences import say
from vitsweep.tables.sweep_tables import SweepTables
from vitsweep.tables.valid_runs import checked_cells, row_keys

ALIKE = ("cores_per_rank", "images_per_rank")
"""What else should be the same where devices are compared."""


def per_chip(cells: DataFrame) -> DataFrame:
    """Return throughput per rank relative to the baseline of the slowest device, slowest device first.

    Empty where no cell was measured.

    Throughput per rank is that of one accelerator. Different devices
    never share a block, so the ratio has no interval; the spread of each row is shown.

    Args:
        cells: one row per cell and device.
    """
    cells = checked_cells(
        cells, "images_per_second_per_rank", "baseline_cell_id", "sweep", "device", "claim",
        "images_per_step", "world_size",
    )  # fmt: skip
    measured = cells[cells["status"] == Status.measured].dropna(
        subset=["images_per_second_per_rank"]
    )
    if measured.empty:
        return NOTHING
    baselines = measured[row_keys(measured) == row_keys(measured, "baseline_cell_id")]
    slowest = (baselines if len(baselines) else measured).nsmallest(1, "images_per_second_per_rank")
    row = slowest.iloc[0]
    columns = ["cell_id", "baseline_cell_id", "device", *varying_columns(cells)]
    numbers = ["images_per_second_per_rank", "blocks", "throughput_spread", *ALIKE]
    rates = measured["images_per_second_per_rank"]
    order = rates.groupby(measured["device"].astype(str)).transform("min")
    return (
        measured.assign(
            _order=order,
            cores_per_rank=cores_per_rank(measured),
            images_per_rank=measured["images_per_step"] / measured["world_size"],
        )
        .sort_values(["_order", "images_per_second_per_rank"])
        .reindex(columns=[*columns, *numbers, "model_tflops_per_rank", "mfu"])
        .assign(
            relative_throughput=lambda t: (
                t["images_per_second_per_rank"] / row["images_per_second_per_rank"]
            ),
            reference=f"{row['device']}, {row['cell_id']}",
        )
    )


def table_of(tables: SweepTables) -> DataFrame:
    """Return throughput per chip where several kinds of device were measured."""
    return per_chip(tables.settings) if mixed(tables.settings) else NOTHING


def draw(table: DataFrame) -> Figure:
    """Draw the table of `per_chip`: bars in groups of one device, the slowest on top."""
    names = [" · ".join(pair) for pair in zip(table["device"], labels(table), strict=True)]
    reference = table["reference"].iloc[0] if len(table) else ""
    bars = Bars(
        column="relative_throughput", group=first_group(table), reference=1.0,
        label=f"Throughput per chip relative to {reference} (x)",
        note=lambda row: ratio(row["relative_throughput"]),
    )  # fmt: skip
    return bars.draw(table, names)


def differing(table: DataFrame) -> str:
    """Return what else than device and technique differs between the rows; empty for nothing."""
    several = {name: sorted(table[name].dropna().unique()) for name in ALIKE}
    listed = [
        f"{name.replace('_', ' ')} {', '.join(map(plain, values))}"
        for name, values in several.items()
        if len(values) > 1
    ]
    return say("differing", listed="; ".join(listed)) if listed else ""


CHART = Chart("Throughput per chip", table_of, draw, differing)
