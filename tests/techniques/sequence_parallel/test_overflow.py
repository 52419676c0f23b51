"""An overflow on one rank is skipped by all, where ranks hold different gradients."""

from pathlib import Path

import pytest
import torch

from tests.cells import TINY, entry
from tests.techniques.sequence_parallel.cases import answers
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World

SCALED = (
    "precision=O1",
    "precision.half_dtype=bfloat16",
    "precision.loss_scale=dynamic",
    "optimizer=sgd_loop",
    "model.depth=4",
)


def skipped(world: World, cells: list[CellSpec]) -> list[bool]:
    """Whether every rank skips a step in which one gradient of the last rank is inf, and no other."""
    return [_skipped(world, each) for each in cells]


def _skipped(world: World, each: CellSpec) -> bool:
    torch.manual_seed(0)
    trainer = parallelize(build_model(each), each, world)
    share = my_share(each, global_batch(each, 0, world), world)
    flags, moved = [], []
    for spoilt in (False, True):
        handle = _spoil(trainer.model) if spoilt and world.rank == world.size - 1 else None
        before = [p.detach().clone() for p in trainer.model.parameters()]
        trainer.step(iter(share))
        after = list(trainer.model.parameters())
        flags.append(bool(trainer.skipped[-1]))
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        if handle:
            handle.remove()
    return flags == [False, True] and moved == [True, False]


def _spoil(model: torch.nn.Module) -> torch.utils.hooks.RemovableHandle:
    name, weight = next((n, p) for n, p in model.named_parameters() if ".up.weight" in n)
    assert weight.requires_grad, name
    return weight.register_hook(lambda gradient: torch.full_like(gradient, float("inf")))


@pytest.mark.slow
def test_all_ranks_skip_what_one_cannot_use(tmp_path: Path) -> None:
    methods = ("tensor_parallel=megatron", "pipeline_parallel=gpipe")
    cells = [entry(*TINY, *SCALED, each, "resources.ranks_per_node=2").spec for each in methods]
    for names, is_skipped in answers(skipped, cells, tmp_path):
        assert is_skipped, names
