"""The last part of `gpu.py`: predictions of `vitsweep plan`, made first, beside what is then measured."""

import math
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from gpu_list import BASE, PREDICTED
from gpu_steps import (
    NO_TIME,
    Run,
    Size,
    cell_of,
    end_if_lost,
    our_step,
    reason_of,
    release,
    seconds_of,
)

from vitsweep.extras.predict.prediction import predict_cell
from vitsweep.extras.predict.step_time import StepTrace
from vitsweep.extras.predict.trace_pool import trace_cells
from vitsweep.measure.memory import peak_memory, reset_peak
from vitsweep.spec.cell_spec import CellSpec

GIB = 2**30
TRACING = 0.6
"""Share of the part's time after which tracing ends; what is not traced by then is not measured."""
SHORT_S = 0.5
"""Timed steps of one cell."""


def prediction(run: Run) -> None:
    """Predict cells from its device's published figures, then measure them.

    Every prediction is written before the first cell runs. Errors are predicted over measured, minus 1.
    """
    size, rows, cells = run.size, [], {}
    for model, images, choices in PREDICTED:
        name = f"{model} at {images} {' '.join(choices)}".strip()
        row: dict[str, Any] = {"name": name}
        rows.append(row)
        try:
            # A smoke test keeps its own model and a batch that any CPU can train.
            shape = size if size.seconds == 0 else replace(size, model=model, extra=())
            images = 4 if size.seconds == 0 else images
            cells[name] = cell_of(shape, *BASE, *choices, images=images)
        except SystemExit as refused:
            row["reason"] = reason_of(refused)
    left = run.deadline - time.monotonic()
    traces = trace_cells(cells, seconds=None if left == math.inf else max(0.0, TRACING * left))
    for row in rows:
        if row["name"] in cells:
            row |= _predicted(cells[row["name"]], traces.get(row["name"]))
    run.write({"rows": rows})
    for row in rows:
        if "predicted_ms" not in row:
            continue
        if run.is_late:
            row["reason"] = NO_TIME
            continue
        row |= _measured(cells[row["name"]], size)
        run.write({"rows": rows, "summary": _summary(rows)})
        end_if_lost(size)


def _predicted(cell: CellSpec, trace: StepTrace | str | None) -> dict[str, Any]:
    if not isinstance(trace, StepTrace):
        return {"reason": trace or "its trace took too long"}
    found = predict_cell(cell, trace)
    return {
        "predicted_ms": found.step_time_ms,
        "low_ms": found.low_ms,
        "high_ms": found.high_ms,
        "predicted_gib": trace.memory.peak / GIB,
        "rates": found.rates,
    }


def _measured(cell: CellSpec, size: Size) -> dict[str, Any]:
    device = torch.device(size.device)
    release(size)
    try:
        step = our_step(cell)
        step()  # the optimizer makes its state
        reset_peak(device)
        seconds = seconds_of(step, replace(size, seconds=min(SHORT_S, size.seconds)))
    except (Exception, SystemExit) as error:  # the others go on
        return {"reason": reason_of(error)}
    return {
        "measured_ms": 1e3 * seconds,
        "measured_gib": peak_memory(device)["peak_allocated_gib"],  # None on a CPU
    }


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of those that were measured."""
    found = [row for row in rows if "measured_ms" in row]
    if not found:
        return {}
    errors = sorted(abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in found)
    memory = [row for row in found if row["measured_gib"]]
    peaks = [abs(row["predicted_gib"] / row["measured_gib"] - 1) for row in memory]
    return {
        "cells": len(found),
        "median error of step time": statistics.median(errors),
        "p90 error of step time": errors[math.ceil(0.9 * len(errors)) - 1],
        "held by the interval of 80 %": statistics.fmean(
            row["low_ms"] <= row["measured_ms"] <= row["high_ms"] for row in found
        ),
        "largest error of the allocated peak": max(peaks, default=None),
    }
