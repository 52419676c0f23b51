"""What an elementwise optimizer updates under FSDP: plain tensors in the memory of the shards."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.cells import cell
from tests.ranks import on_ranks
from tests.techniques.averaging.test_ema import EMA, averaged
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World


def updated_in_place(world: World, cells: list[CellSpec]) -> list[dict[str, bool]]:
    return [_updated(world, spec) for spec in cells]


def _updated(world: World, spec: CellSpec) -> dict[str, bool]:
    """What holds after two steps from a model on `meta`."""
    with torch.device("meta"):
        model = build_model(spec)
    trainer = parallelize(model, spec, world)
    for step in range(2):
        trainer.step(iter(my_share(spec, global_batch(spec, step, world), world)))
    shards = {n: p.to_local() for n, p in trainer.model.named_parameters()}
    tensors = [p for g in trainer.optimizer.param_groups for p in g["params"]]
    states = [v for state in trainer.optimizer.state.values() for v in state.values()]
    return {
        "one each": len(tensors) == len(shards),
        "same memory": {t.data_ptr() for t in tensors if t.numel()}
        == {s.data_ptr() for s in shards.values() if s.numel()},
        "plain": not any(isinstance(t, DTensor) for t in (*tensors, *states)),
        "no gradients left": not any(
            p.grad is not None for p in (*trainer.model.parameters(), *tensors)
        ),
    }


def updated_and_averaged(
    world: World, cells: list[CellSpec], ema: CellSpec
) -> tuple[list[dict[str, bool]], dict[str, float]]:
    return updated_in_place(world, cells), averaged(world, [ema])[0]


@pytest.mark.slow
def test_short_shards_are_updated_as_plain_tensors_in_their_own_memory_and_averaged(
    tmp_path: Path,
) -> None:
    """Three ranks: of 10 rows the last has two, which FSDP2 pads, in other memory."""
    ranks = ("resources.ranks_per_node=3", "batch.images_per_step=12", "sharding=fsdp")
    cells = [
        cell(*ranks, f"optimizer={optimizer}", "precision.dtype=float64")
        for optimizer in ("adamw_foreach", "sgd_foreach", "sgd_fused")
    ]
    ema = cell(*EMA, *ranks, "precision.dtype=float64")
    found_by_rank = on_ranks(3, updated_and_averaged, cells[0], cells, ema, folder=tmp_path)
    for of_rank, _ in found_by_rank:
        for spec, found in zip(cells, of_rank, strict=True):
            assert found == dict.fromkeys(found, True), spec.optimizer.name
    answer = found_by_rank[0][1]
    assert answer["restored"] == 0
    assert answer["moved"] > 1e-3
    assert answer["average"] < 1e-6
