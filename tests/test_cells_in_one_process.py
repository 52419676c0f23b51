"""Cells that run in one process, one after the other or by turns, do not influence one another."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cells import entry
from tests.data.cells_and_worlds import world as lone_world
from tests.equivalence import whole_weights
from tests.ranks import on_ranks, placed
from tests.test_cell import run, short
from tests.training.alone import alone
from vitsweep.errors import VitsweepError
from vitsweep.model.build import first_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training.trainer import Trainer
from vitsweep.world import World

STEPS = 2
CHOICES = (
    ("sharding=zero1", "precision=O2"),
    ("sharding=fsdp", "memory=recompute_blocks"),
    ("sharding=fsdp", "precision=bf16", "batch.accumulation_steps=2"),
    ("sharding=ddp", "optimizer=sgd_foreach", "averaging=ema"),
    ("sharding=ddp", "optimizer=adamw_contiguous", "precision=O1"),
    ("sharding=zero2", "memory=recompute_selected"),
)


def cells() -> list[CellSpec]:
    base = ("model=module", "model.target=tests.user_modules.build", "batch.images_per_step=16",
            "resources.threads_per_rank=1", "resources.ranks_per_node=2")  # fmt: skip
    return [entry(*base, *choice).spec for choice in CHOICES]


def start(world: World, cell: CellSpec) -> Trainer:
    return parallelize(first_model(cell), cell, placed(world, cell))


def step(trainer: Trainer, number: int) -> None:
    batch = global_batch(trainer.cell, number, trainer.world)
    trainer.step(iter(my_share(trainer.cell, batch, trainer.world)))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return whole_weights(trainer.model.named_parameters())


def trained_in_orders(world: World, found: list[CellSpec], orders: list[list[int]]) -> list[Any]:
    answers = []
    for order in orders:
        ended = {}
        for index in order:
            trainer = start(world, found[index])
            for number in range(STEPS):
                step(trainer, number)
            ended[index] = weights(trainer)
        answers.append(ended)
    trainers = [start(world, cell) for cell in found]  # all alive, and by turns
    for number in range(STEPS):
        for trainer in trainers:
            step(trainer, number)
    return [*answers, {index: weights(trainer) for index, trainer in enumerate(trainers)}]


def test_weights_do_not_depend_on_what_ran_before_or_runs_by_turns(tmp_path: Path) -> None:
    found, numbers = cells(), list(range(len(CHOICES)))
    orders = [numbers, *(random.Random(seed).sample(numbers, len(numbers)) for seed in range(1))]
    first, *others = on_ranks(2, trained_in_orders, found[0], found, orders, folder=tmp_path)[0]
    for other in others:
        for index, choice in enumerate(CHOICES):
            for name, wanted in first[index].items():
                assert torch.equal(other[index][name], wanted), (choice, name)


def test_a_world_with_the_mesh_of_another_cell_is_refused() -> None:
    ddp, fsdp = (
        entry("resources.ranks_per_node=2", "batch.images_per_step=16", choice).spec
        for choice in ("sharding=ddp", "sharding=fsdp")
    )
    with pytest.raises(VitsweepError, match="mesh"):
        parallelize(first_model(fsdp), fsdp, lone_world(replicate=ddp.mesh.replicate))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cell_leaves_the_flags_of_the_process_as_they_were(precision: str) -> None:
    before = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("medium")
    try:
        run(short(alone(f"precision={precision}")))
        assert torch.backends.cudnn.benchmark
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.backends.cudnn.benchmark = before[0]
        torch.set_float32_matmul_precision(before[1])
