"""Straight-line laws through scaling curves, and what they predict."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pandas import DataFrame

from vitsweep.tables.scaling import CurveSteps, Floats, curve_steps
from vitsweep.tables.stats import mean_interval

FEWEST_SIZES = 3
"""A line through two points fits whatever was measured."""
NEXT_SIZES = (2, 4)
"""Predicted are the largest world that was measured, doubled and doubled again."""
BYTES_AGREE = 0.05
"""Relative; bytes per rank that follow (n - 1) / n more loosely are not extrapolated."""

LAWS = {
    "amdahl": "step = serial + parallel / ranks (Amdahl 1967); strong scaling",
    "bytes": "step = constant + bytes sent per rank / bandwidth; weak scaling",
    "communication": "time in collectives = latency + bytes sent per rank / bandwidth (Hockney 1994)",
}

FIT_COLUMNS = (
    "curve scaling law num_sizes num_blocks constant_ms constant_ms_low constant_ms_high "
    "serial_fraction serial_fraction_low serial_fraction_high bandwidth_gb_per_s "
    "bandwidth_gb_per_s_low bandwidth_gb_per_s_high worst_residual note"
).split()
PREDICTED_COLUMNS = (
    "curve scaling law world_size extrapolated step_ms images_per_second images_per_second_low "
    "images_per_second_high efficiency efficiency_low efficiency_high"
).split()


def scaling_fits(
    runs: DataFrame, baselines: Mapping[str, str | None], mixed_hardware: bool = False
) -> DataFrame:
    """Fit the laws `LAWS` to every scaling curve.

    Each law is a line y = a + b x through the points of a curve, with equal relative weights. It is
    fitted block by block, so that what differs between blocks stays out, and the 95 % intervals are
    Student's t over the blocks' fits. Sizes that never shared a block are matched in the order in
    which they ran. Oversubscribed points are left out.

    Args:
        runs: one row per run, in the columns of the store.
        baselines: cell -> its baseline, None where it has none.
        mixed_hardware: take points of different devices together.

    Returns:
        One row per curve (as in `scaling_efficiency`) and law:
        `constant_ms` is the serial part, the step without communication, or the latency;
        `serial_fraction` its share of the step on one rank (`amdahl` only, may be below 0 where
        caches help more than communication costs); `bandwidth_gb_per_s` is bytes over time that
        they add (`bytes`: what is not hidden; empty where they add none); `worst_residual` is the
        largest relative distance of a size's mean from the line. Without a fit (fewer than 3 sizes,
        no bytes counted) the numbers are empty and `note` says why.

    Raises:
        VitsweepError: a column is missing, or the points ran on different devices (unless
            `mixed_hardware`).
    """
    rows = [
        row
        for curve in curve_steps(runs, baselines, mixed_hardware)
        for row in (_fit_row(curve, _step_law(curve)), _fit_row(curve, "communication"))
        if row
    ]
    return DataFrame(rows, columns=FIT_COLUMNS)


def predicted_scaling(
    runs: DataFrame,
    baselines: Mapping[str, str | None],
    mixed_hardware: bool = False,
    curves: DataFrame | None = None,
) -> DataFrame:
    """Return the fitted curves at the measured worlds and at `NEXT_SIZES` times the largest.

    The law is `amdahl` for strong and `bytes` for weak scaling; bytes are extrapolated where they
    follow (n - 1) / n, as rings and FSDP's collectives do. Intervals are Student's t over blocks:
    they hold the noise of the measurement, not what the law does not know (another node, another
    switch).

    Returns:
        One row per curve and world: `extrapolated`, `step_ms`, `images_per_second` (img/s of all
        ranks) and `efficiency` with their intervals. Empty for curves without a fit.

    Raises:
        VitsweepError: as `scaling_fits`.
    """
    rows = [
        row
        for curve in curve_steps(runs, baselines, mixed_hardware, curves=curves)
        for row in _predicted_rows(curve)
    ]
    return DataFrame(rows, columns=PREDICTED_COLUMNS)


def _step_law(curve: CurveSteps) -> str:
    return "amdahl" if curve.kind == "strong" else "bytes"


def _line(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return a and b of y = a + b x for each row of y, by least squares of relative distances."""
    weights = 1 / y**2
    total, first, second = weights.sum(axis=1), weights @ x, weights @ x**2
    of_y, of_xy = (weights * y).sum(axis=1), (weights * y) @ x
    determinant = total * second - first**2
    slope = (total * of_xy - first * of_y) / determinant
    return (of_y - slope * first) / total, slope


def _law(curve: CurveSteps, law: str) -> tuple[Floats, Floats, Floats, str]:
    """Return x, y (blocks x sizes), which sizes take part, and why there is no fit."""
    x = 1 / curve.ranks if law == "amdahl" else curve.bytes_per_step
    y = curve.step_ms
    part = np.isfinite(x)
    if law == "communication":
        part &= (curve.ranks > 1) & (curve.communication_ms > 0)
        y = np.atleast_2d(curve.communication_ms)
    what = {
        "amdahl": "",
        "bytes": " with counted bytes",
        "communication": " with timed collectives",
    }
    why = ""
    if part.sum() < FEWEST_SIZES:
        why = f"{int(part.sum())} sizes{what[law]}; a fit needs {FEWEST_SIZES}"
    elif len(set(np.round(x[part] / x[part].max(), 6))) < 2:
        why = "every size sends the same bytes"
    elif not len(y):
        why = "no block holds a throughput"
    return x[part], y[:, part], part, why


def _fit_row(curve: CurveSteps, law: str) -> dict[str, Any]:
    x, y, part, why = _law(curve, law)
    if law == "communication" and not part.any():
        return {}
    over = ", ".join(map(str, curve.left_out))
    notes = [why, f"oversubscribed and left out: {over} ranks" if over else ""]
    row: dict[str, Any] = {
        "curve": curve.name,
        "scaling": curve.kind,
        "law": law,
        "num_sizes": int(part.sum()),
        "num_blocks": len(y),
    }
    if not why:
        constant, slope = _line(x, y)
        row |= _named("constant_ms", mean_interval(constant))
        mean_constant, mean_slope = _line(x, np.exp(np.log(y).mean(axis=0))[None])
        line = mean_constant[0] + mean_slope[0] * x
        row["worst_residual"] = float(np.abs(line / np.exp(np.log(y).mean(axis=0)) - 1).max())
        if law == "amdahl":
            row |= _named("serial_fraction", mean_interval(constant / (constant + slope)))
        else:
            row |= _named("bandwidth_gb_per_s", _bandwidth(mean_interval(slope)))
            notes.append("" if row["bandwidth_gb_per_s"] > 0 else "more bytes took no more time")
    return row | {"note": "; ".join(n for n in notes if n)}


def _named(name: str, interval: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip((name, f"{name}_low", f"{name}_high"), interval, strict=True))


def _bandwidth(ms_per_byte: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return GB/s from ms per byte; an end at or below 0 ms is no finite bandwidth and empty."""
    middle, low, high = (1e-6 / v if v > 0 else float("nan") for v in ms_per_byte)
    return middle, high, low


def _predicted_rows(curve: CurveSteps) -> Iterator[dict[str, Any]]:
    law = _step_law(curve)
    x, y, part, why = _law(curve, law)
    if why:
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
