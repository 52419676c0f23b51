"""Ranks that are late now and then: the step time is the elapsed time over the steps."""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cells import cell
from tests.ranks import on_ranks
from vitsweep.measure.summarize import summarize_window
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.timed_steps import endless, timed_steps
from vitsweep.world import World

STEPS, LATE_S = 60, 0.005


def late_now_and_then(stream: Iterator[Any], seed: int) -> Iterator[Any]:
    """Hand on micro-batches, half of them 5 ms late."""
    chance = random.Random(seed)
    for batch in stream:
        time.sleep(LATE_S * chance.randrange(2))
        yield batch


def run(world: World, spec: CellSpec) -> dict[str, Any]:
    torch.manual_seed(spec.seed)
    trainer = parallelize(build_model(spec), spec, world)
    stream = late_now_and_then(endless(spec.data.open(spec, world)), seed=world.rank)
    found = timed_steps(trainer, stream, spec.measurement)
    elapsed_s = time.perf_counter() - found.window_start
    return {"times": found.times_ms, "waits": found.data_waits_ms, "elapsed_s": elapsed_s}


@pytest.mark.slow
def test_random_delays_of_both_ranks_do_not_add_up_twice(tmp_path: Path) -> None:
    spec = cell("measurement=smoke", "resources.threads_per_rank=1")
    spec = replace(spec, measurement=replace(spec.measurement, measured_steps=STEPS))
    ranks = on_ranks(2, run, spec, spec, folder=tmp_path)
    times = [rank["times"] for rank in ranks]
    warmup = spec.measurement.warmup_steps
    found = summarize_window(
        times, [False] * len(times[0]), warmup, [rank["waits"] for rank in ranks]
    )
    wall_ms = 1e3 * max(rank["elapsed_s"] for rank in ranks)
    counted = np.array(times)[:, found.warmup_steps :]
    cut_ms = np.array(times)[:, warmup : found.warmup_steps].sum(axis=1).max()
    elapsed_ms = found.metrics["step_time_ms"] * found.steps
    assert elapsed_ms == pytest.approx(counted.sum(axis=1).max())
    assert elapsed_ms + cut_ms == pytest.approx(wall_ms, rel=0.02)
    assert counted.max(axis=0).sum() > 1.01 * elapsed_ms, "maxima of single steps add up jitter"
    assert found.metrics["data_wait_ms"] > 0.3 * LATE_S * 1e3
