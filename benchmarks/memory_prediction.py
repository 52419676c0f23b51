"""Predicted against measured peak memory of a rank's process on this machine.

`python -m benchmarks.memory_prediction --cells 32` draws cells by a seed (models, batches, precisions,
shardings, optimizers, recomputation, 1 and 2 ranks), lets each run as any sweep would, and compares
`peak_rss_gib` with `predicted_peak_gib`, which was written before the cell ran. Memory does not mind other
programs, so that the machine need not be idle. It takes some 10 s per cell.

Twice is worth it: libc keeps blocks below its threshold (up to 32 MiB) in a heap of holes, which the
process goes on holding. With `MALLOC_MMAP_THRESHOLD_=65536` before the command it returns what is freed,
and the peak is what a step needs; without, what a process ends up holding.
"""

import argparse
import math
import os
import random
import statistics
import tempfile
from typing import Any

import vitsweep
from benchmarks.kept import keep
from vitsweep.composition.composer import Composer
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.resources import Machine

MODELS = {  # overrides -> images per rank
    "model=vit_nano": (16, 128, 512, 1024),
    "model=vit_tiny data=synthetic batch.resolution_px=96": (8, 32, 96),
    "model=vit_tiny data=synthetic": (2, 8, 24),
    "model=vit_small data=synthetic": (1, 4, 12),
    "model=vit_base data=synthetic": (1, 2, 4),
    "model=vit_large data=synthetic model.depth=8": (1, 2),
}
PRECISIONS = ("fp32", "bf16", "O2", "bf16_params", "bf16_masters")
OPTIMIZERS = ("adamw_loop", "adamw_foreach", "adamw_fused", "adamw_contiguous", "sgd_foreach")
SHARDINGS = ("ddp", "fsdp", "zero1", "zero2")
MEMORY = ("keep_all", "keep_all", "recompute_blocks", "recompute_selected")
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
"""What glibc reads: from how many bytes on a block is a mapping of its own, returned when it is freed."""
FEW_STEPS = ("measurement=smoke", "measurement.measured_steps=2", "measurement.warmup_steps=1")


def draw(count: int, seed: int) -> list[str]:
    """Return the overrides of distinct cells that can run here."""
    choose, composer, machine = random.Random(seed), Composer(), Machine.here()
    found: dict[str, str] = {}
    while len(found) < count:
        model = choose.choice(list(MODELS))
        ranks = choose.choice((1, 2))
        overrides = (
            f"{model} batch.images_per_step={ranks * choose.choice(MODELS[model])} "
            f"resources.ranks_per_node={ranks} precision={choose.choice(PRECISIONS)} "
            f"optimizer={choose.choice(OPTIMIZERS)} memory={choose.choice(MEMORY)} "
            f"sharding={choose.choice(SHARDINGS) if ranks > 1 else 'none'}"
        )
        planned = plan_cell(composer.compose(overrides.split()), machine)
        if not planned.reasons:
            found.setdefault(planned.cell_id, overrides)
    return list(found.values())


def measure(cells: list[str]) -> list[dict[str, Any]]:
    """Run each cell once; return its overrides, predicted and measured GiB, or why it has none."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, overrides in enumerate(cells):
            words = [*overrides.split(), *FEW_STEPS, "sweep.baseline=null", "sweep.report=false"]
            found = vitsweep.sweep(
                words, name=f"cell_{number}", show=False, sweep={"folder": folder}
            )
            own = found.cells.iloc[0] if len(found.cells) else {}
            rows.append(
                {
                    "overrides": overrides,
                    "status": str(own.get("status")),
                    "predicted_gib": _number(own.get("predicted_peak_gib")),
                    "measured_gib": _number(own.get("peak_rss_gib")),
                }
            )
            print(line(rows[-1]), flush=True)
    return rows


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def line(row: dict[str, Any]) -> str:
    """Return one row as text."""
    if not (row["predicted_gib"] and row["measured_gib"]):
        return f"{row['status']:>9}  no figures  {row['overrides']}"
    error = row["predicted_gib"] / row["measured_gib"] - 1
    both = f"{row['predicted_gib']:.3f} against {row['measured_gib']:.3f} GiB"
    return f"{error:+6.1%}  {both}  {row['overrides']}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return errors: predicted over measured, minus 1."""
    errors = [
        r["predicted_gib"] / r["measured_gib"] - 1
        for r in rows
        if r["predicted_gib"] and r["measured_gib"]
    ]
    sizes = sorted(abs(error) for error in errors)
    return {
        "cells": len(errors),
        "median_error": statistics.median(sizes),
        "p90_error": sizes[math.ceil(0.9 * len(sizes)) - 1],
        "lowest": min(errors),
        "highest": max(errors),
        "within_10_percent": sum(size <= 0.1 for size in sizes) / len(sizes),
    }


def main() -> None:
    """Draw, run, print, keep."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--cells", type=int, default=32)
    options.add_argument("--seed", type=int, default=17)
    options.add_argument("--dry", action="store_true", help="only list the cells")
    asked = options.parse_args()
    cells = draw(asked.cells, asked.seed)
    if asked.dry:
        print("\n".join(cells))
        return
    rows = measure(cells)
    figures = summary(rows)
    for name, value in figures.items():
        print(f"{name:20s} {value if isinstance(value, int) else round(value, 3)}")
    threshold = os.environ.get(THRESHOLD)
    name = "memory_prediction_returned" if threshold else "memory_prediction"
    keep(name, {**figures, "seed": asked.seed, THRESHOLD: threshold, "each": rows})


if __name__ == "__main__":
    main()
