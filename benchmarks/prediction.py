"""Predicted against measured step times on this machine; wants it idle.

`python -m benchmarks.prediction --cpu` calibrates (3 minutes), draws 40 cells by a seed (models, batches,
precisions, shardings, optimizers, 1 and 2 ranks; none of them was used to calibrate), writes down the
prediction of each, then measures all of them twice (6 minutes). It prints and keeps the error beside that
of the second measurement, the rank correlation within each model, and how many measurements the 80 %
intervals hold.

`--plan` predicts as `plan` does on a machine without a calibration, from operators that it times at the
shapes of the cells, and draws 24 cells of other widths, depths and batches than any named sweep has. The
spread of what these predictions missed by is the one that `plan` states (`measured_rates.UNCALIBRATED`).
`ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2`, or `ONEDNN_MAX_CPU_ISA=AVX512_CORE`, make another
processor of this one.
"""

import argparse
import math
import random
import statistics
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import psutil
from rich.console import Console
from scipy.stats import spearmanr

from benchmarks.kept import keep
from vitsweep.composition.composer import Composer
from vitsweep.extras.predict.calibrate import measure_steps
from vitsweep.extras.predict.calibration import load_calibration
from vitsweep.extras.predict.machine import calibrate
from vitsweep.extras.predict.prediction import predict_cell, predict_cells
from vitsweep.extras.predict.step_time import StepTimePrediction, StepTrace
from vitsweep.extras.predict.trace_pool import trace_cells
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.rates.profile import device_name
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import Machine

MODELS = {  # overrides -> images per step and rank
    "model=vit_nano": (8, 24, 48, 96),
    "model=vit_nano model.depth=8": (8, 16, 32, 64),
    "model=vit_tiny data=synthetic batch.resolution_px=96": (2, 4, 8, 12),
    "model=vit_tiny data=synthetic": (1, 2, 3, 4),
    "model=vit_small data=synthetic batch.resolution_px=96": (2, 3, 4, 6),
}
PRECISIONS = ("fp32", "bf16", "bf16_params")
OPTIMIZERS = ("adamw_loop", "adamw_foreach", "adamw_fused", "sgd_foreach")
SHARDINGS = ("ddp", "fsdp", "zero1")
PLANNED = {
    f"model.width={width} model.num_heads=4 model.mlp_width={4 * width} model.depth={depth}": images
    for width in (64, 96, 160, 256, 384, 512)
    for depth in (2, 3, 6)
    for images in [(2, 6, 12, 24, 48)]
}
"""The same of `--plan`: width 64 to 512, 4 to 96 images of all ranks together."""
SECONDS_PER_CELL = 60.0
"""At most: where bfloat16 is emulated, a step of the largest cells takes 5 s."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One cell of the draw.

    Attributes:
        model: its overrides of the model, within which ranks are correlated.
        overrides: all of them.
        cell: the cell.
        prediction: made before the cell ran.
    """

    model: str
    overrides: str
    cell: CellSpec
    prediction: StepTimePrediction


def draw(count: int, seed: int, as_planned: bool) -> list[Drawn]:
    """Draw distinct cells that can run, and predict each, from the calibration or as `plan` does."""
    models = PLANNED if as_planned else MODELS
    precisions = ("fp32", "O1", "O2") if as_planned else PRECISIONS
    shardings = ("ddp", "fsdp") if as_planned else SHARDINGS
    choose, composer, machine = random.Random(seed), Composer(), Machine.here()
    found: dict[str, tuple[str, str, CellSpec]] = {}
    while len(found) < count:
        model = choose.choice(list(models))
        ranks = choose.choice((1, 2))
        images = ranks * choose.choice(models[model])
        sharding = choose.choice(shardings) if ranks > 1 else "ddp"
        overrides = (
            f"{model} batch.images_per_step={images} resources.ranks_per_node={ranks} "
            f"precision={choose.choice(precisions)} optimizer={choose.choice(OPTIMIZERS)} "
            f"sharding={sharding} measurement=smoke"
        )
        planned = plan_cell(composer.compose(overrides.split()), machine)
        if planned.reasons or planned.cell_id in found:
            continue
        found[planned.cell_id] = (model, overrides, planned.spec)
    cells = {name: cell for name, (_, _, cell) in found.items()}
    predictions: dict[str, StepTimePrediction | None] = {}
    if as_planned:
        predictions = {name: each.step_time for name, each in predict_cells(cells).items()}
    else:
        traces = trace_cells(cells)
        predictions = {
            name: predict_cell(cell, trace)
            for name, cell in cells.items()
            if isinstance(trace := traces[name], StepTrace)
        }
    return [
        Drawn(model=model, overrides=overrides, cell=cell, prediction=prediction)
        for name, (model, overrides, cell) in found.items()
        if (prediction := predictions.get(name))
    ]


def measure(cells: list[Drawn]) -> list[float]:
    """Return the step time of each cell; those with equally many ranks share their processes."""
    times: dict[int, float] = {}
    for ranks in sorted({c.cell.resources.world_size for c in cells}):
        own = [i for i, c in enumerate(cells) if c.cell.resources.world_size == ranks]
        found = measure_steps([cells[i].cell for i in own], SECONDS_PER_CELL * len(own))
        for i, ms in zip(own, found, strict=True):
            times[i] = ms
    return [times[i] for i in range(len(cells))]


def summary(cells: list[Drawn], first: list[float], second: list[float]) -> dict[str, Any]:
    """Return errors, repeat errors, correlation within models and coverage of the intervals."""
    predicted = [c.prediction.step_time_ms for c in cells]
    errors = [abs(p / m - 1) for p, m in zip(predicted, first, strict=True)]
    repeats = [abs(b / a - 1) for a, b in zip(first, second, strict=True)]
    within = {}
    for model in dict.fromkeys(c.model for c in cells):
        own = [i for i, c in enumerate(cells) if c.model == model]
        if len(own) >= 4:
            rho = spearmanr([predicted[i] for i in own], [first[i] for i in own]).statistic
            within[model] = round(float(rho), 3)
    held = [
        c.prediction.low_ms <= m <= c.prediction.high_ms for c, m in zip(cells, first, strict=True)
    ]
    logs = [math.log(m / p) for m, p in zip(first, predicted, strict=True)]
    return {
        "cells": len(cells),
        "log_spread": math.sqrt(statistics.mean(log**2 for log in logs)),
        "median_factor": math.exp(statistics.median(logs)),
        "median_error": statistics.median(errors),
        "p90_error": _p90(errors),
        "median_repeat_error": statistics.median(repeats),
        "p90_repeat_error": _p90(repeats),
        "bias": statistics.median(p / m - 1 for p, m in zip(predicted, first, strict=True)),
        "held_by_80_percent_interval": sum(held) / len(held),
        "spearman_within_model": within,
    }


def _stolen_share(before: Any, after: Any) -> float:
    """Return the share of processor time that a virtual machine's host gave to others meanwhile."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in before._fields}
    return float(spent.get("steal", 0.0) / sum(spent.values()))


def _p90(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def main() -> None:
    """Calibrate, draw, predict, measure twice, print, keep."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--cpu", action="store_true", required=True)
    options.add_argument("--cells", type=int)
    options.add_argument("--seed", type=int, default=17)
    options.add_argument(
        "--keep-calibration", action="store_true", help="use the saved calibration"
    )
    options.add_argument("--plan", action="store_true", help="predict without a calibration")
    asked = options.parse_args()
    known = None
    if not asked.plan:
        known, notice = load_calibration(str(device_name("cpu")), version("torch"))
        if not (asked.keep_calibration and known):
            calibrate(Console())
            known, notice = load_calibration(str(device_name("cpu")), version("torch"))
        assert known, notice
    cells = draw(asked.cells or (24 if asked.plan else 40), asked.seed, asked.plan)
    print(f"{len(cells)} cells are predicted; measuring them twice")
    before = psutil.cpu_times()
    first, second = measure(cells), measure(cells[::-1])[::-1]
    stolen = _stolen_share(before, psutil.cpu_times())
    for c, a, b in zip(cells, first, second, strict=True):
        p = c.prediction
        print(
            f"{p.step_time_ms / a - 1:+5.0%} repeat {b / a - 1:+5.0%}  {p.step_time_ms:7.1f} "
            f"({p.low_ms:.1f} to {p.high_ms:.1f}) against {a:7.1f} ms  {c.overrides}"
        )
    figures = summary(cells, first, second) | {"stolen_share": stolen}
    for name, value in figures.items():
        print(f"{name:30s} {value if isinstance(value, (dict, int)) else round(value, 3)}")
    kept_cells = [
        {"overrides": c.overrides, "predicted_ms": c.prediction.step_time_ms, "low_ms": c.prediction.low_ms,
         "high_ms": c.prediction.high_ms, "measured_ms": a, "again_ms": b}
        for c, a, b in zip(cells, first, second, strict=True)
    ]  # fmt: skip
    setups = [
        {"ranks": s.ranks, "dispatch_us": s.dispatch_us, "scale": s.scale, "log_error": s.log_error}
        for s in (known.setups if known else ())
    ]
    keep(
        "prediction_plan" if asked.plan else "prediction_cpu",
        {**figures, "seed": asked.seed, "calibration": setups, "each": kept_cells},
    )


if __name__ == "__main__":
    main()
