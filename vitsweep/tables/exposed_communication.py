"""How much of the communication of a scaling point is hidden behind computation."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from pandas import DataFrame

from vitsweep.tables import formatting
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


def presented_exposed(table: DataFrame) -> DataFrame:
    """Return `exposed_communication` as text, for the points with several ranks; times in ms per step.

    Empty where no point sends anything or was compared with a smaller world.
    """
    if table.empty:
        return DataFrame()
    several = table[(table["world_size"] > 1) & table["exposed_ms"].notna()]
    several = several[several["communication_ms"].notna()]
    rows = [
        {
            "curve": formatting.plain(row["curve"]),
            "ranks": str(row["world_size"])
            + (" (oversubscribed)" if row["oversubscribed"] else ""),
            "step ms": formatting.number(row["step_ms"]),
            "compute ms": formatting.number(row["compute_ms"]),
            "exposed ms": _with_ends(row),
            "overlapped ms": formatting.number(row["overlapped_ms"]),
            "communication ms": formatting.number(row["communication_ms"]),
            "exposed of step": formatting.percent(row["exposed_share"]),
            "blocks": str(row["num_blocks"]),
            "note": row["note"],
        }
        for row in several.to_dict("records")
    ]
    return DataFrame(rows, dtype=str)


def _with_ends(row: Mapping[Hashable, Any]) -> str:
    ends = [row["exposed_ms_low"], row["exposed_ms_high"]]
    text = formatting.number(row["exposed_ms"])
    shown = "" if any(map(formatting.missing, ends)) else ", ".join(map(formatting.number, ends))
    return f"{text} [{shown}]" if shown else text


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
