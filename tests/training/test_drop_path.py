"""Stochastic depth: which branches are left out, and that ranks, micro-batches and recomputation agree."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cells import cell
from tests.data.cells_and_worlds import world
from tests.training.alone import alone, batch, weights
from vitsweep.model.block import blocks_of
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.regularize import DroppingBlock, StochasticDepth
from vitsweep.training.trainer import Trainer

EXACT = ("precision.dtype=float64", "optimizer=adamw_loop")
RATE = 0.5


def decisions(spec: CellSpec, rank: int, step: int) -> Tensor:
    """Return whether the branches of the last block are kept for one replica's images: (2, images)."""
    here = world(rank, replicate=spec.mesh.data_parallel_size)
    model = build_model(spec)
    depth = StochasticDepth(model, RATE, spec, here)
    last: Any = blocks_of(model)[-1]
    depth.draw(step)
    parts = []
    for part in range(spec.batch.accumulation_steps):
        depth.select(part)
        parts.append(torch.stack([last.attention_factors, last.mlp_factors]) > 0)
    return torch.cat(parts, 1)


def test_ranks_and_micro_batches_leave_out_the_same_images() -> None:
    whole = decisions(alone("batch.images_per_step=64"), 0, 3)
    assert 0.3 < float(whole[-1].float().mean()) < 0.7
    in_turn = decisions(alone("batch.images_per_step=64", "batch.accumulation_steps=2"), 0, 3)
    assert torch.equal(in_turn, whole)
    two = cell("resources.ranks_per_node=2", "sharding=ddp", "batch.images_per_step=64")
    assert torch.equal(torch.cat([decisions(two, rank, 3) for rank in range(2)], 1), whole)
    assert not torch.equal(decisions(alone("batch.images_per_step=64"), 0, 4), whole)


def trained(trainer: Trainer, steps: int = 5) -> dict[str, Tensor]:
    for step in range(steps):
        trainer.step(iter([batch(2 * step, images=4), batch(2 * step + 1, images=4)]))
    assert trainer.steps_taken == steps
    return weights(trainer)


def begun(*overrides: str, rate: float = RATE) -> Trainer:
    spec = alone(*EXACT, "batch.accumulation_steps=2", *overrides)
    torch.manual_seed(spec.seed)
    return parallelize(build_model(spec), spec, world(), rate)


@pytest.mark.parametrize("how", ["recomputed", "compiled"])
def test_a_step_that_is_computed_in_another_way_leaves_out_the_same(how: str) -> None:
    wanted = trained(begun())
    trainer = begun("memory=recompute_blocks" if how == "recomputed" else "memory=keep_all")
    if how == "compiled":  # as `compilation=compile_blocks`, whose blocks share their code
        for block in blocks_of(trainer.model):
            block.compile(backend="aot_eager", fullgraph=True)
    found = trained(trainer)
    other = trained(begun(rate=0.0))
    assert any(not torch.equal(other[name], value) for name, value in wanted.items())
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)


def test_axial_attention_leaves_out_whole_images() -> None:
    """It has the rows of each image in the place of images."""
    block: Any = DroppingBlock()
    block.images_axis = 0
    found = block._times(torch.ones(6, 4, 2), torch.tensor([0.0, 2.0]))
    assert found[:, 0, 0].tolist() == [0, 0, 0, 2, 2, 2]
