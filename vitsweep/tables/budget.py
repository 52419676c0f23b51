"""Peak memory, hours per epoch, and the cost of a training run."""

from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.record import Status
from vitsweep.tables.columns import varying
from vitsweep.tables.show import peak_gib
from vitsweep.tables.tidy import one_device

IMAGENET_1K = 1_281_167
"""Training images of ImageNet-1k (ILSVRC 2012)."""


def with_peak(cells: DataFrame) -> DataFrame:
    """Add `peak_gib`: allocated on a GPU, resident on CPU, empty where neither is known."""
    peaks = [peak_gib(row) for _, row in cells.iterrows()]
    return cells.assign(peak_gib=Series(peaks, cells.index, dtype=float))


def measured_with_peak(cells: DataFrame, mixed_hardware: bool = False) -> DataFrame:
    """Return the measured cells with their `peak_gib`."""
    return (
        cells[cells["status"] == Status.measured].pipe(one_device, mixed_hardware).pipe(with_peak)
    )


def epoch_hours(cells: DataFrame, images: int = IMAGENET_1K) -> DataFrame:
    """Return hours per epoch of `images`, beside the baseline's, for every measured cell.

    hours = images / throughput / 3600. The interval is the baseline's hours divided by the ends of
    the speedup, so it contains the noise of the ratio alone.
    """
    measured = cells[cells["status"] == Status.measured]
    hours = images / measured["images_per_second"] / 3600
    of_cell = dict(zip(measured["cell_id"], hours, strict=True))
    base = measured["baseline_cell_id"].map(of_cell).astype(float)
    spread = [
        c
        for c in ("baseline_cell_id", "throughput_spread", "blocks", "speedup", "claim")
        if c in measured
    ]
    return (
        measured[["cell_id", *varying(cells), "images_per_second", *spread]]
        .assign(
            epoch_hours=hours,
            epoch_hours_low=base / measured["speedup_high"],
            epoch_hours_high=base / measured["speedup_low"],
            baseline_epoch_hours=base,
        )
        .sort_values("epoch_hours")
    )


def cost(
    cells: DataFrame,
    price_per_rank_hour: float,
    epochs: float,
    images: int = IMAGENET_1K,
    currency: str = "USD",
) -> DataFrame:
    """Return rank-hours and money for `epochs` epochs of `images`, cheapest first.

    rank-hours = epochs x images / throughput / 3600 x ranks; a rank is one GPU where there are any.

    Raises:
        VitsweepError: a negative price, or no epochs.
    """
    if price_per_rank_hour < 0 or epochs <= 0:
        raise VitsweepError(
            f"`cost` needs a price of at least 0 and more than 0 epochs; got {price_per_rank_hour} "
            f"{currency} and {epochs}."
        )
    table = epoch_hours(cells, images)
    ranks = cells.set_index("cell_id")["world_size"].reindex(table["cell_id"]).to_numpy(float)
    return table.assign(
        world_size=ranks,
        train_hours=table["epoch_hours"] * epochs,
        rank_hours=table["epoch_hours"] * epochs * ranks,
        money=table["epoch_hours"] * epochs * ranks * price_per_rank_hour,
        saved=(table["baseline_epoch_hours"] - table["epoch_hours"])
        * epochs
        * ranks
        * price_per_rank_hour,
        currency=currency,
    ).sort_values("money")
