"""Runs with traced steps, and a sweep of two cells that has them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.builders import run
from vitsweep.results.record import RunRecord
from vitsweep.results.store import Store

COLUMNS = ["rank", "step", "class", "operator", "shapes", "calls", "ms", "work"]
OPTIMIZER_MS = {"aa": 2.0, "bb": 9.0}
METRICS = {
    "forward_ms": 20.0,
    "backward_ms": 50.0,
    "optimizer_ms": 2.0,
    "num_parameters": 1e8,
    "model_flops_per_image": 1.2e11,
    "activation_gib": 4.0,
    "parameter_gib": 0.4,
    "gradient_gib": 0.4,
    "optimizer_state_gib": 0.8,
    "model_tflops_per_rank": 100.0,
    "peak_tflops": 989.5,
}
"""Of a step whose roofline is known on an H200."""


def traced(
    record: RunRecord, rows: Sequence[Sequence[Any]], plain_ms: float, critical_rank: int = 0
) -> RunRecord:
    """The run with rows of `COLUMNS`."""
    trace = {"columns": COLUMNS, "rows": rows, "plain_ms": plain_ms, "critical_rank": critical_rank}
    return replace(record, samples={"trace": trace})


def traced_sweep(folder: Path, blocks: int = 3) -> Store:
    """Blocks of `aa` (fused AdamW) and its baseline `bb` (a loop); `aa` has this forward pass, `bb` 10 ms."""
    store = Store(folder).create()
    for block in range(blocks):
        for cell_id, choice in (("aa", "adamw_fused"), ("bb", "adamw_loop")):
            ms = OPTIMIZER_MS[cell_id] + 0.1 * (block % 2)
            host = 30.0
            phases = {"forward_ms": host - 20, "backward_ms": 20.0, "optimizer_ms": ms}
            rows = [
                [0, 0, "optimizer", "aten::add_", "", 5, ms, 0.0],
                [0, 0, "launch gaps (host)", "", "", 0, host + 1, 0.0],
            ]
            speed = 64e3 / (host + ms)
            counted = {"num_parameters": 1e6, "model_flops_per_image": 1e8, "peak_tflops": 0.5}
            record = run(cell_id, f"b{block}", speed, minute=block, sweep=folder.name,
                         metrics=phases | counted, optimizer=choice)  # fmt: skip
            store.save_run(traced(record, rows, host + ms))
    store.append_command({"baselines": {"aa": "bb", "bb": "bb"}, "command": "python -m vitsweep"})
    return store
