"""Metrics of the user's that have no value in runs that were measured, and why, in one sentence each."""

from pandas import DataFrame, Series

from vitsweep.results.metrics import own_metrics
from vitsweep.results.record import Status
from vitsweep.tables.formatting import count

LONGEST_REASON = 300
"""Characters that a sentence shows of what a function raised or returned."""


def empty_metrics(runs: DataFrame) -> list[str]:
    """Return one sentence for each of the user's metrics that could not be computed in some runs.

    Args:
        runs: one row per run; those that were measured before a metric was defined do not count.
    """
    if "status" not in runs:
        return []
    measured = runs[runs["status"] == Status.measured]
    known = [c for c in own_metrics(runs) if {c, f"{c}_reason"} <= set(measured.columns)]
    return [_sentence(c, measured) for c in known if measured[f"{c}_reason"].notna().any()]


def _sentence(column: str, measured: DataFrame) -> str:
    reason = f"{column}_reason"
    empty = measured[reason].notna()
    computed = empty | measured[column].notna()
    reasons = measured.loc[empty, reason].map(lambda text: " ".join(str(text).split()))
    common, *others = reasons.value_counts().index
    shown = common if len(common) <= LONGEST_REASON else f"{common[: LONGEST_REASON - 1]}…"
    more = (
        f" {count(len(others), 'more reason')} in `{reason}` of `runs.parquet`." if others else ""
    )
    return (
        f"The metric `{column}` has no value in {empty.sum():,} of {count(computed.sum(), 'run')}: "
        f"{shown.removesuffix('.')}.{more}"
    )


# Why half precision is not faster on a CPU, in one sentence above a table.


HALF = ("bfloat16", "float16")
NARROW = 256
"""Below this width a ViT's matrix products are too small for bfloat16 instructions to matter."""


def half_precision_note(cells: DataFrame) -> str:
    """Return why no cell in half precision is faster than its float32 baseline on this CPU.

    Args:
        cells: one row per cell.

    Returns:
        A sentence; empty where a cell is faster, where none was compared, on GPUs, and in records
        that do not say which instructions the CPU has.
    """
    needed = ("device_type", "compute_dtype", "cpu_half_precision", "speedup", "baseline_cell_id")
    if not {*needed, "status", "cell_id"} <= set(cells.columns):
        return ""
    dtype = dict(zip(cells["cell_id"], cells["compute_dtype"].astype(str), strict=True))
    over_float32 = cells["baseline_cell_id"].map(dtype).astype(str).eq("float32")
    on_cpu = cells["status"].eq(Status.measured) & cells["device_type"].eq("cpu")
    half = cells[on_cpu & over_float32 & cells["compute_dtype"].isin(HALF)].dropna(
        subset=["speedup", "cpu_half_precision"]
    )
    if half.empty or (half["speedup"] > 1).any():
        return ""
    if half["cpu_half_precision"].eq("none").all():
        return "This CPU has no bfloat16 instructions: it emulates half precision, slower than float32."
    width = half.get("model.width", Series(dtype=float)).astype(float).max()
    if not width < NARROW:
        return ""
    return (
        f"With a width of {width:g} matrix products are a small part of the step: half precision speeds up "
        "wider models."
    )
