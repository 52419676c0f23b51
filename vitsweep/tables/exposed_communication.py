"""How much of the communication of a scaling point is hidden behind computation."""

from collections.abc import Iterator, Mapping
from typing import Any

from pandas import DataFrame

from vitsweep.tables.curve_steps import CurveSteps, curve_steps, over_blocks

EXPOSED_COLUMNS = (
    "curve scaling cell_id world_size oversubscribed step_ms compute_ms exposed_ms exposed_ms_low "
    "exposed_ms_high communication_ms overlapped_ms exposed_share num_blocks note"
).split()


def exposed_communication(
    runs: DataFrame, baselines: Mapping[str, str | None], mixed_hardware: bool = False
) -> DataFrame:
    """Tell how much of the communication of every scaling point is hidden behind computation.

    compute = step of the smallest world x images per rank / its images per rank;
    exposed = step - compute (paired within blocks, Student's t); overlapped = communication_ms -
    exposed, at least 0. Where the smallest world has several ranks, its own exposed time counts as
    computation: `note` says so.

    Returns:
        One row per point of every curve, times in ms of one step. `exposed_share` is of the step.

    Raises:
        VitsweepError: as `scaling_fits`.
    """
    rows = [
        row
        for curve in curve_steps(runs, baselines, mixed_hardware, all_points=True)
        for row in _exposed_rows(curve)
    ]
    return DataFrame(rows, columns=EXPOSED_COLUMNS)


def _exposed_rows(curve: CurveSteps) -> Iterator[dict[str, Any]]:
    per_rank = curve.images / curve.ranks
    alone = curve.ranks[0] == 1
    note = "" if alone else f"what {int(curve.ranks[0])} ranks expose counts as computation"
    for i, (_, point) in enumerate(curve.points.iterrows()):
        compute = curve.step_ms[:, 0] * per_rank[i] / per_rank[0]
        exposed, low, high = over_blocks(curve.step_ms[:, i] - compute)
        step = float(curve.step_ms[:, i].mean()) if len(curve.step_ms) else float("nan")
        total = float(curve.communication_ms[i])
        if curve.ranks[i] == 1:
            total = 0.0 if total != total else total
        first = i == 0
        yield {
            "curve": curve.name,
            "scaling": curve.kind,
            "cell_id": point["cell_id"],
            "world_size": int(curve.ranks[i]),
            "oversubscribed": bool(point["oversubscribed"]),
            "step_ms": step,
            "compute_ms": float(compute.mean()) if len(compute) else float("nan"),
            "exposed_ms": exposed,
            "exposed_ms_low": float("nan") if first else low,
            "exposed_ms_high": float("nan") if first else high,
            "communication_ms": total,
            "overlapped_ms": max(total - max(exposed, 0.0), 0.0)
            if total == total
            else float("nan"),
            "exposed_share": exposed / step,
            "num_blocks": len(curve.step_ms),
            "note": note,
        }
