"""Time, money and memory: what a cell costs, which cells are worth it."""

from collections.abc import Sequence

import numpy as np
from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import METRICS
from vitsweep.results.record import Status
from vitsweep.tables.columns import varying
from vitsweep.tables.show import peak_gib
from vitsweep.tables.tidy import one_device

IMAGENET_1K = 1_281_167
"""Training images of ImageNet-1k (ILSVRC 2012)."""

OBJECTIVES = ("images_per_second", "peak_gib", "accuracy_top1")


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
    the speedup, so it holds the noise of the ratio alone.
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


def pareto_front(
    cells: DataFrame, objectives: Sequence[str] = OBJECTIVES, mixed_hardware: bool = False
) -> DataFrame:
    """Return the measured cells with `on_front`: no other cell is better in one and worse in none.

    Objectives that no cell has are left out; a cell that lacks one of the others is not on the
    front. Compared are the medians: cells within the noise of the front may be as good.

    Raises:
        VitsweepError: an objective of which neither way is better, or none that was measured.
    """
    table = measured_with_peak(cells, mixed_hardware)
    used = [o for o in objectives if o in table and table[o].notna().any()]
    unsigned = [o for o in used if METRICS[o].better is None]
    if unsigned or not used:
        raise VitsweepError(f"No cell can be better in {', '.join(unsigned or objectives)}.")
    signs = np.array([1.0 if METRICS[o].better == "higher" else -1.0 for o in used])
    points = table[used].to_numpy(float) * signs
    return table.assign(
        on_front=[_undominated(point, points) for point in points], objectives=", ".join(used)
    ).sort_values(used[0], ascending=signs[0] < 0)


def best_under(
    cells: DataFrame,
    memory_gib: float | None = None,
    ranks: int | None = None,
    accuracy: float | None = None,
    epoch_hours: float | None = None,
    mixed_hardware: bool = False,
) -> DataFrame:
    """Return the measured cells that keep every limit, the highest throughput first.

    Args:
        cells: one row per cell.
        memory_gib: most that the worst rank may take.
        ranks: largest world.
        accuracy: lowest top-1, as a fraction.
        epoch_hours: longest epoch of ImageNet-1k.
        mixed_hardware: compare cells of different devices.
    """
    table = measured_with_peak(cells, mixed_hardware)
    limits = (
        ("peak_gib", memory_gib, "le"),
        ("world_size", ranks, "le"),
        ("accuracy_top1", accuracy, "ge"),
        ("epoch_hours_imagenet1k", epoch_hours, "le"),
    )
    for column, limit, relation in limits:
        if limit is not None:
            values = table[column] if column in table else Series(np.nan, table.index)
            table = table[getattr(values, relation)(limit)]
    return table.sort_values("images_per_second", ascending=False)


def _undominated(point: np.ndarray, points: np.ndarray) -> bool:
    if np.isnan(point).any():
        return False
    return not ((points >= point).all(axis=1) & (points > point).any(axis=1)).any()
