"""Straight-line laws through scaling curves, and what they predict."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from vitsweep.tables.scaling import CurveSteps, Floats, curve_steps
from vitsweep.tables.stats import mean_interval

FEWEST_SIZES = 3
"""A line through two points fits whatever was measured."""
NEXT_SIZES = (2, 4)
"""Predicted are the largest world that was measured, doubled and doubled again."""
BYTES_AGREE = 0.05
"""Relative; bytes per rank that follow (n - 1) / n more loosely are not extrapolated."""

LAW_OF = {"strong": "amdahl", "weak": "bytes"}
"""Amdahl (1967): step = serial + parallel / ranks; bytes: step = constant + bytes per rank / bandwidth."""
PREDICTED_COLUMNS = (
    "curve scaling law world_size extrapolated step_ms images_per_second images_per_second_low "
    "images_per_second_high efficiency efficiency_low efficiency_high"
).split()


def predicted_scaling(
    runs: DataFrame,
    baselines: Mapping[str, str | None],
    curves: DataFrame | None = None,
) -> DataFrame:
    """Return the fitted curves at the measured worlds and at `NEXT_SIZES` times the largest.

    The law is a line through the points of a curve with equal relative weights: `amdahl` for strong and
    `bytes` for weak scaling. It is fitted block by block, so that what differs between blocks stays out;
    sizes that never shared a block are matched in the order in which they ran, and oversubscribed points
    are left out. Bytes are extrapolated where they follow (n - 1) / n, as rings and FSDP's collectives do.
    Intervals are Student's t over blocks: they hold the noise of the measurement, not what the law does
    not know (another node, another switch).

    Args:
        runs: one row per run, in the columns of the store.
        baselines: cell -> its baseline, None where it has none.
        curves: as `scaling_efficiency` returns them, where they are there already.

    Returns:
        One row per curve and world: `extrapolated`, `step_ms`, `images_per_second` (img/s of all
        ranks) and `efficiency` with their intervals. Empty for curves of fewer than 3 sizes, or without
        counted bytes.

    Raises:
        VitsweepError: a column is missing, or the points ran on different devices.
    """
    rows = [row for curve in curve_steps(runs, baselines, curves) for row in _predicted_rows(curve)]
    return DataFrame(rows, columns=PREDICTED_COLUMNS)


def _line(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return a and b of y = a + b x for each row of y, by least squares of relative distances."""
    weights = 1 / y**2
    total, first, second = weights.sum(axis=1), weights @ x, weights @ x**2
    of_y, of_xy = (weights * y).sum(axis=1), (weights * y) @ x
    determinant = total * second - first**2
    slope = (total * of_xy - first * of_y) / determinant
    return (of_y - slope * first) / total, slope


def _points(curve: CurveSteps) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return x and y (blocks x sizes) of the line through a curve, and which sizes take part; maybe none."""
    x = 1 / curve.ranks if curve.kind == "strong" else curve.bytes_per_step
    part = np.isfinite(x)
    is_line = part.sum() >= FEWEST_SIZES and np.ptp(x[part]) > 1e-6 * x[part].max()
    part &= is_line and len(curve.step_ms) > 0
    return x[part], curve.step_ms[:, part], part


def _named(name: str, interval: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def _predicted_rows(curve: CurveSteps) -> Iterator[dict[str, Any]]:
    law = LAW_OF[curve.kind]
    x, y, part = _points(curve)
    if not part.any():
        return
    constant, slope = _line(x, y)
    ranks, images = curve.ranks[part], curve.images[part]
    beyond = [float(ranks[-1] * factor) for factor in NEXT_SIZES]
    at = dict(zip(ranks.tolist(), x.tolist(), strict=True)) | _next(law, ranks, x, beyond)
    for world, where in at.items():
        step = constant + slope * where
        if (step <= 0).any():
            continue
        of_step = images[0] if curve.kind == "strong" else images[0] / ranks[0] * world
        speed = 1000 * of_step / step
        first = 1000 * images[0] / y[:, 0]
        yield {
            "curve": curve.name,
            "scaling": curve.kind,
            "law": law,
            "world_size": int(world),
            "extrapolated": world > ranks[-1],
            "step_ms": float(np.exp(np.log(step).mean())),
            **_named("images_per_second", _of_logs(speed)),
            **_named("efficiency", _of_logs(speed / first * ranks[0] / world)),
        }


def _of_logs(values: Floats) -> tuple[float, float, float]:
    middle, low, high = mean_interval(np.log(values))
    return float(np.exp(middle)), float(np.exp(low)), float(np.exp(high))


def _next(law: str, ranks: Floats, x: Floats, beyond: list[float]) -> dict[float, float]:
    """Return x of the worlds that were not measured; none where it does not follow from the others."""
    if law == "amdahl":
        return {world: 1 / world for world in beyond}
    several = ranks > 1
    whole = x[several] * ranks[several] / (ranks[several] - 1)
    if np.abs(whole / whole.mean() - 1).max() > BYTES_AGREE:
        return {}
    return {world: float(whole.mean()) * (world - 1) / world for world in beyond}
