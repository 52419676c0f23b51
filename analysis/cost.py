"""Rank-hours and money of a training run."""

from pandas import DataFrame

from vitsweep.errors import VitsweepError
from vitsweep.tables.cost import IMAGENET_1K, epoch_hours
from vitsweep.tables.valid_runs import checked_cells, of_baseline


def cost(
    cells: DataFrame,
    price_per_rank_hour: float,
    epochs: float,
    images: int = IMAGENET_1K,
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
