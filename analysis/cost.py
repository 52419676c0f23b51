"""Rank-hours and money of a training run."""

from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.measure.utilization import IMAGENET_1K_IMAGES
from vitsweep.results.record import Status
from vitsweep.tables.names import varying_columns
from vitsweep.tables.valid_runs import checked_cells, row_keys


def cost(
    cells: DataFrame,
    price_per_rank_hour: float,
    epochs: float,
    images: int = IMAGENET_1K_IMAGES,
    currency: str = "USD",
) -> DataFrame:
    """Return rank-hours and money for `epochs` epochs of `images`, cheapest first.

    rank-hours = epochs x images / throughput / 3600 x ranks; a rank is one GPU where there are any.
    `saved` is the money of the cell's baseline, on the baseline's own ranks, minus that of the cell.

    Raises:
        VitsweepError: a negative price, or no epochs.
    """
    if price_per_rank_hour < 0 or epochs <= 0:
        raise VitsweepError(
            f"`cost` needs a price of at least 0 and more than 0 epochs; got {price_per_rank_hour} "
            f"{currency} and {epochs}."
        )
    cells = checked_cells(cells, "world_size")
    table = epoch_hours(cells, images)
    world_size = cells["world_size"].astype(float)
    ranks = world_size.reindex(table.index)
    of_base = of_baseline(cells.assign(_ranks=world_size), "_ranks").reindex(table.index)
    price = epochs * price_per_rank_hour
    money = table["epoch_hours"] * ranks * price
    return table.assign(
        world_size=ranks,
        train_hours=table["epoch_hours"] * epochs,
        rank_hours=table["epoch_hours"] * epochs * ranks,
        money=money,
        saved=table["baseline_epoch_hours"].astype(float) * of_base.astype(float) * price - money,
        currency=currency,
    ).sort_values("money")


def epoch_hours(cells: DataFrame, images: int = IMAGENET_1K_IMAGES) -> DataFrame:
    """Return hours per epoch of `images`, beside the baseline's, for every measured cell.

    hours = images / throughput / 3600. The interval is as wide, relative to the hours, as that of the
    speedup, so it contains the noise of the ratio alone.
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
            epoch_hours_low=hours * measured["speedup"] / measured["speedup_high"].astype(float),
            epoch_hours_high=hours * measured["speedup"] / measured["speedup_low"].astype(float),
            baseline_epoch_hours=base,
        )
        .sort_values("epoch_hours")
    )


def of_baseline(cells: DataFrame, column: str) -> Series:
    """Return for every row the value of `column` in the row of its baseline, missing if there is none.

    The baseline of a row is the one of its own sweep and device.
    """
    known = Series(cells[column].to_numpy(), row_keys(cells))
    known = known[~known.index.duplicated(keep="last")]
    return Series(known.reindex(row_keys(cells, "baseline_cell_id")).to_numpy(), cells.index)
