"""Small tables of runs with known answers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pandas import DataFrame

from vitsweep.planning.sweep_plan import SweepPlan
from vitsweep.results.record import RunRecord, Status
from vitsweep.tables.cells import cells as cells_of_runs
from vitsweep.tables.sweep_tables import SweepTables

PLAIN = {
    "precision": "fp32",
    "sharding": "ddp",
    "optimizer": "adamw_loop",
    "layout": "batch_first",
    "classifier": "token",
    "attention": "sdpa_auto",
    "sequence_parallel": "none",
    "tensor_parallel": "none",
    "pipeline_parallel": "none",
    "memory": "keep_all",
    "compilation": "eager",
    "loader": "workers",
    "runtime": "plain",
    "vit_block": "plain",
    "tokens": "all",
    "averaging": "none",
    "schedule": "constant",
    "model": "vit_nano",
    "data": "digits",
    "task": "measure",
    "batch": "base",
    "measurement": "standard",
    "half_dtype": "bfloat16",
    "images_per_step": 64,
    "accumulation_steps": 1,
    "resolution_px": 8,
    "num_tokens": 17,
    "nodes": 1,
    "ranks_per_node": 2,
    "world_size": 2,
    "seed": 0,
    "precision.master_weights": False,
}
ENVIRONMENT = {
    "device": "AMD EPYC 7B13",
    "device_type": "cpu",
    "torch": "2.13.0",
    "host": "node-1",
    "git_commit": "0123abcd",
    "git_dirty": False,
}


def run(
    cell_id: str,
    block: str = "b0",
    images_per_second: float | None = 100.0,
    status: Status = Status.measured,
    reason: str = "",
    metrics: dict[str, float | None] | None = None,
    validity: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    minute: int = 0,
    sweep: str = "sample",
    **spec: Any,
) -> RunRecord:
    """One run; `spec` overrides the plain cell, `minute` orders runs in time."""
    speed = images_per_second if status == Status.measured else None
    images = spec.get("images_per_step", PLAIN["images_per_step"])
    ranks = spec.get("world_size", PLAIN["world_size"])
    measured = (
        {"images_per_second": speed}
        if not speed
        else {
            "images_per_second": speed,
            "images_per_second_per_rank": speed / ranks,
            "step_time_ms": 1000 * images / speed,
            "epoch_hours_imagenet1k": 1_281_167 / speed / 3600,
        }
    )
    return RunRecord(
        run_id=f"{cell_id}-{block}-{minute}",
        sweep=sweep,
        cell_id=cell_id,
        block=block,
        position=0,
        attempt=1,
        status=status,
        reason=reason,
        spec=PLAIN | spec,
        metrics=measured | (metrics or {}),
        validity={"oversubscribed": False, "shared_device": False, "throttled": False}
        | {"drifting": False, "proved": "twin"}
        | (validity or {}),
        environment=ENVIRONMENT
        | {"started_at": f"2026-10-20T10:{minute:02d}:00+00:00"}
        | (environment or {}),
    )


def of_present_code(plan: SweepPlan, runs: Iterable[RunRecord]) -> list[RunRecord]:
    """The same runs, measured by the code as it is; those that name a code keep it."""
    return [
        replace(r, environment={"code_hash": plan.entries[r.cell_id].code.hash} | r.environment)
        for r in runs
    ]


def table(*records: RunRecord) -> DataFrame:
    return DataFrame([record.row() for record in records])


def from_runs(
    runs: DataFrame, baselines: Mapping[str, str | None], cells: DataFrame | None = None
) -> SweepTables:
    """Tables of runs that are in no folder; of these cells, where they are not those of the runs."""
    found = SweepTables()
    of_runs = cells_of_runs(runs, baselines) if cells is None else cells
    found.__dict__.update({"every_run": runs, "baselines": dict(baselines), "cells": of_runs})
    return found
