"""The average of weights equals the loop that everyone writes, wherever the weights lie."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cells import cell
from tests.equivalence import whole_weights
from tests.ranks import on_ranks, placed
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.techniques.averaging.ema import MovingAverage
from vitsweep.world import World

STEPS = 5


def test_the_average_is_the_loop() -> None:
    for dtype in [torch.float64, torch.float32, torch.bfloat16]:
        for warmup, every in [(False, 1), (True, 1), (True, 2)]:
            torch.manual_seed(0)
            weights = [torch.randn(size).to(dtype) for size in ((5, 3), (4,), ())]
            wanted = [w.to(torch.promote_types(dtype, torch.float32), copy=True) for w in weights]
            found = MovingAverage(weights, 0.9, warmup=warmup, every=every)
            for step in range(8):
                for weight in weights:
                    weight.add_(torch.randn_like(weight))
                found.update(step)
                if (step + 1) % every == 0:
                    t = step // every
                    decay = min(0.9, (1 + t) / (10 + t)) if warmup else 0.9
                    wanted = [
                        decay * a + (1 - decay) * w.to(a.dtype)
                        for a, w in zip(wanted, weights, strict=True)
                    ]
            for average, expected in zip(found.averages, wanted, strict=True):
                torch.testing.assert_close(average, expected, rtol=1e-6, atol=1e-6)


def averaged(world: World, cells: list[CellSpec]) -> list[dict[str, float]]:
    """How far the averaged and the restored weights are from a loop over whole weights."""
    return [_averaged(placed(world, each), each) for each in cells]


def _averaged(world: World, each: CellSpec) -> dict[str, float]:
    torch.manual_seed(each.seed)
    with torch.device("meta"):
        model = build_model(each)
    trainer = parallelize(model, each, world)

    def weights() -> dict[str, Tensor]:
        return {n: w.clone() for n, w in whole_weights(trainer.model.named_parameters()).items()}

    loop = weights()
    for step in range(STEPS):
        trainer.step(iter(my_share(each, global_batch(each, step, world), world)))
        loop = {n: 0.75 * loop[n] + 0.25 * w for n, w in weights().items()}
    last = weights()
    with trainer.averaged_weights():
        found = weights()
    return {
        "average": max(float((found[n] - w).abs().max()) for n, w in loop.items()),
        "restored": max(float((w - last[n]).abs().max()) for n, w in weights().items()),
        "moved": max(float((w - last[n]).abs().max()) for n, w in loop.items()),
    }


EMA = (
    "averaging=ema",
    "averaging.decay=0.75",
    "averaging.warmup=false",
    "optimizer.learning_rate=0.01",
)


@pytest.mark.slow
def test_shards_slices_masters_and_flat_buffers_are_averaged_where_they_are(tmp_path: Path) -> None:
    cells = [
        cell(*EMA, *case)
        for case in (
            ("sharding=ddp", "precision.dtype=float64"),
            ("sharding=fsdp", "precision.dtype=float64"),
            ("sharding=zero1", "precision.dtype=float64"),
            ("sharding=ddp", "optimizer=adamw_contiguous", "optimizer.learning_rate=0.01"),
            ("sharding=zero1", "precision=O2", "precision.half_dtype=bfloat16"),
            ("sharding=ddp", "precision=O2", "precision.half_dtype=bfloat16"),
        )
    ]
    found: list[Any] = on_ranks(2, averaged, cells[0], cells, folder=tmp_path)[0]
    for each, answer in zip(cells, found, strict=True):
        exact = each.precision.name == "fp32"
        name = f"{each.sharding.name} {each.optimizer.name} {each.precision.name}"
        assert answer["restored"] == 0, name
        assert answer["moved"] > 1e-3, name
        # O2: the loop sees the half-precision copies, the average their float32 masters.
        assert answer["average"] < (1e-6 if exact else 0.02), name
