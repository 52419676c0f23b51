"""Predicted against measured step times on this machine; wants it idle.

`python -m benchmarks.prediction` draws 24 cells by a seed (other widths, depths and batches than any named
sweep has; precisions, shardings, optimizers, 1 and 2 ranks), predicts each as `plan` does, then measures each
twice, as sweeps of their own (10 minutes). It prints and keeps the error beside that of the second
measurement, and how many measurements the 80 % intervals hold. The spread of what these predictions missed by
is the one that `plan` states (`measured_rates.LOG_ERROR`).

`ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`, or `ONEDNN_MAX_CPU_ISA=AVX512_CORE`, make another
processor of this one.
"""

import argparse
import math
import random
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

import vitsweep
from benchmarks.kept import keep
from vitsweep.composition.composer import Composer
from vitsweep.extras.predict.prediction import predict_cells
from vitsweep.extras.predict.step_time import StepTimePrediction
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine

WIDTHS, DEPTHS, IMAGES = (64, 96, 160, 256, 384, 512), (2, 3, 6), (2, 6, 12, 24, 48)
"""Images of one rank and step."""
PRECISIONS = ("fp32", "O1", "O2")
OPTIMIZERS = ("adamw_loop", "adamw_foreach", "adamw_fused", "sgd_foreach")
SHARDINGS = ("ddp", "fsdp")


def draw(count: int, seed: int) -> dict[str, StepTimePrediction]:
    """Draw distinct cells that can run; return overrides -> prediction."""
    choose, composer, machine = random.Random(seed), Composer(), Machine.here()
    cells: dict[str, CellSpec] = {}
    while len(cells) < count:
        width, ranks = choose.choice(WIDTHS), choose.choice((1, 2))
        overrides = (
            f"model.width={width} model.num_heads=4 model.mlp_width={4 * width} "
            f"model.depth={choose.choice(DEPTHS)} batch.images_per_step={ranks * choose.choice(IMAGES)} "
            f"resources.ranks_per_node={ranks} precision={choose.choice(PRECISIONS)} "
            f"optimizer={choose.choice(OPTIMIZERS)} "
            f"sharding={choose.choice(SHARDINGS) if ranks > 1 else 'ddp'} measurement=smoke"
        )
        planned = plan_cell(composer.compose(overrides.split()), machine)
        if not planned.reasons:
            cells[overrides] = planned.spec
    found = predict_cells(cells)
    return {name: each.step_time for name, each in found.items() if each.step_time}


def measure(cells: list[str]) -> list[float]:
    """Return the step time of each cell, from a sweep of its own."""
    times = []
    for overrides in cells:
        with TemporaryDirectory() as folder:
            found = vitsweep.sweep(*overrides.split(), f"sweep.folder={Path(folder) / 'sweep'}")
            times.append(float(found.cells["step_time_ms"].iloc[0]))
    return times


def summary(
    cells: list[StepTimePrediction], first: list[float], second: list[float]
) -> dict[str, Any]:
    """Return errors, repeat errors and coverage of the intervals."""
    predicted = [c.step_time_ms for c in cells]
    errors = [abs(p / m - 1) for p, m in zip(predicted, first, strict=True)]
    repeats = [abs(b / a - 1) for a, b in zip(first, second, strict=True)]
    held = [c.low_ms <= m <= c.high_ms for c, m in zip(cells, first, strict=True)]
    logs = [math.log(m / p) for m, p in zip(first, predicted, strict=True)]
    return {
        "cells": len(cells),
        "log_spread": math.sqrt(statistics.mean(log**2 for log in logs)),
        "median_factor": math.exp(statistics.median(logs)),
        "median_error": statistics.median(errors),
        "p90_error": _p90(errors),
        "median_repeat_error": statistics.median(repeats),
        "p90_repeat_error": _p90(repeats),
        "held_by_80_percent_interval": sum(held) / len(held),
    }


def _stolen_share(before: Any, after: Any) -> float:
    """Return the share of processor time that a virtual machine's host gave to others meanwhile."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in before._fields}
    return float(spent.get("steal", 0.0) / sum(spent.values()))


def _p90(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def main() -> None:
    """Draw, predict, measure twice, print, keep."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--cells", type=int, default=24)
    options.add_argument("--seed", type=int, default=17)
    asked = options.parse_args()
    found = draw(asked.cells, asked.seed)
    names, cells = list(found), list(found.values())
    print(f"{len(cells)} cells are predicted; measuring them twice")
    before = psutil.cpu_times()
    first, second = measure(names), measure(names[::-1])[::-1]
    stolen = _stolen_share(before, psutil.cpu_times())
    for name, p, a, b in zip(names, cells, first, second, strict=True):
        print(
            f"{p.step_time_ms / a - 1:+5.0%} repeat {b / a - 1:+5.0%}  {p.step_time_ms:7.1f} "
            f"({p.low_ms:.1f} to {p.high_ms:.1f}) against {a:7.1f} ms  {name}"
        )
    figures = summary(cells, first, second) | {"stolen_share": stolen}
    for name, value in figures.items():
        print(f"{name:30s} {round(value, 3)}")
    each = [
        {"overrides": name, "predicted_ms": p.step_time_ms, "low_ms": p.low_ms, "high_ms": p.high_ms,
         "measured_ms": a, "again_ms": b}
        for name, p, a, b in zip(names, cells, first, second, strict=True)
    ]  # fmt: skip
    keep("prediction_plan", {**figures, "seed": asked.seed, "each": each})


if __name__ == "__main__":
    main()
