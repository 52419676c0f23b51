"""Weights that never move although they have a gradient are seen, whatever keeps them."""

from pathlib import Path

import pytest
import torch

from tests.techniques.sequence_parallel.cases import answers
from tests.test_cell import run, short
from tests.training.alone import alone, batch, trainer_of
from vitsweep.collectives.primitives import gathered
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.shards import Unmoved, watch_weights
from vitsweep.world import World

ADAMW = ("optimizer=adamw_foreach", "optimizer.learning_rate=1e-4")


def test_norms_in_bfloat16_that_stay_at_one_are_flagged_and_masters_are_not() -> None:
    kept, moved = (
        run(short(alone(f"precision={precision}", *ADAMW)))
        for precision in ("bf16_params", "bf16_masters")
    )
    assert kept.metrics["unmoved_tensor_share"] > 0.05
    assert kept.metrics["unmoved_weight_share"] > 0.05
    assert kept.validity["unmoved_weights"] is True
    assert moved.metrics["unmoved_tensor_share"] == moved.metrics["unmoved_weight_share"] == 0
    assert moved.validity["unmoved_weights"] is False


def test_without_a_warm_up_nothing_is_known() -> None:
    found = run(short(alone(), warmup=0))
    assert found.metrics["unmoved_tensor_share"] is None
    assert found.validity["unmoved_weights"] is None


def test_a_weight_without_a_gradient_does_not_count() -> None:
    trainer = trainer_of(alone("optimizer=sgd_foreach"))
    frozen, still = dict(trainer.model.named_parameters()), "blocks.0.norm_mlp.weight"
    frozen["head.bias"].requires_grad_(False)
    frozen[still].register_hook(lambda gradient: torch.full_like(gradient, 1e-12))
    compare = watch_weights(trainer)
    trainer.step(iter([batch(0)]))
    found = compare()
    assert "head.bias" not in found
    assert [name for name, (given, unmoved) in found.items() if unmoved == given] == [still]


def of_cells(world: World, cells: list[CellSpec]) -> list[list[Unmoved]]:
    """What each rank finds of each cell after two steps."""
    found = []
    for each in cells:
        trainer = parallelize(build_model(each), each, world)
        compare = watch_weights(trainer)
        for step in range(2):
            trainer.step(iter([batch(step, 4)]))
        found.append(gathered(compare()))
    return found


@pytest.mark.slow
def test_every_sharding_and_flat_buffers_show_each_of_their_weights(tmp_path: Path) -> None:
    choices = (
        "sharding=ddp", "sharding=zero1", "sharding=fsdp",
        "sharding=ddp optimizer=adamw_contiguous", "sharding=zero1 precision=bf16_masters",
        "sharding=fsdp precision=bf16_params",
    )  # fmt: skip
    cells = [alone("resources.ranks_per_node=2", *ADAMW, *each.split()) for each in choices]
    sizes = {n: p.numel() for n, p in build_model(cells[0]).named_parameters()}
    found = answers(of_cells, cells, tmp_path)
    in_order = sorted(cells, key=lambda cell: cell.sharding.shards_parameters)
    for each, (label, of_ranks) in zip(in_order, found, strict=True):
        copies = 2 if each.sharding.name == "ddp" else 1
        total = {
            name: [
                sum(counts)
                for counts in zip(*(r[name] for r in of_ranks if name in r), strict=True)
            ]
            for name in sizes
        }
        for name, (given, still) in total.items():
            assert given <= copies * sizes[name] * 1.001, (label, name)
            assert given > 0.5 * copies * sizes[name] or "qkv.bias" in name, (label, name)
            assert not still or "bf16_params" in each.precision.name, (label, name)
        if each.precision.name == "bf16_params":
            assert any(given == still for given, still in total.values()), label
