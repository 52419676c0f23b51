"""Why half precision is not faster on a CPU, in one sentence above a table."""

from pandas import DataFrame, Series

from vitsweep.results.record import Status

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
        return "This CPU has no bfloat16 instructions: half precision is emulated, and slower than float32."
    width = half.get("model.width", Series(dtype=float)).astype(float).max()
    if not width < NARROW:
        return ""
    return (
        f"Half precision makes matrix products faster, and with a width of {width:g} other work takes "
        "most of the step: wider models gain."
    )
