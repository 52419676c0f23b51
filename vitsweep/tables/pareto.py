"""The Pareto front of throughput, memory and accuracy, and the best cells within given limits."""

from collections.abc import Sequence

import numpy as np
from pandas import DataFrame, Series

from vitsweep.errors import VitsweepError
from vitsweep.results.metrics import METRICS
from vitsweep.tables.budget import measured_with_peak

OBJECTIVES = ("images_per_second", "peak_gib", "accuracy_top1")


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
    """Return the measured cells within every limit, the highest throughput first.

    Args:
        cells: one row per cell.
        memory_gib: highest peak memory of the worst rank.
        ranks: largest number of ranks.
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
