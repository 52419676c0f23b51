"""Time of a pipeline is booked where it is spent, although forward and backward interleave."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.techniques.sequence_parallel.cases import answers, cell
from vitsweep.model.block import Block
from vitsweep.model.build import build_model
from vitsweep.parallelize import parallelize
from vitsweep.proof.twin import global_batch, my_share
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.training import timed_steps as clocks
from vitsweep.training.timed_steps import PhaseClock
from vitsweep.world import World

FORWARD, BACKWARD = 1.0, 100.0
"""Seconds that a block takes in these tests, on a clock that nothing else moves."""

DEEP = ("model.depth=8", "pipeline_parallel.microbatches=4")


def booked(world: World, cells: list[CellSpec]) -> list[list[dict[str, Any]]]:
    """Seconds by phase of one step, and the order of the phases, of every rank."""
    found = [_booked(world, each) for each in cells]
    gathered: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(gathered, found)
    return [[of_rank[i] for of_rank in gathered] for i in range(len(cells))]


def _booked(world: World, each: CellSpec) -> dict[str, Any]:
    now = SimpleNamespace(seconds=0.0)
    clocks.time = SimpleNamespace(perf_counter=lambda: now.seconds)

    def advance(seconds: float) -> None:
        now.seconds += seconds

    torch.manual_seed(0)
    trainer = parallelize(build_model(each), each, world)
    share = my_share(each, global_batch(each, 0, world), world)
    trainer.step(iter(share))  # finds the shapes
    for block in (m for m in trainer.model.modules() if isinstance(m, Block)):
        block.norm_attention.register_forward_hook(lambda *_: advance(FORWARD))
        block.register_full_backward_pre_hook(lambda *_: advance(BACKWARD))
    clock = Recorded(world.device)
    clock.begin_step()
    trainer.step(iter(share), clock)
    return {
        "seconds": {p: ms / 1e3 for p, ms in clock.median_step_ms().items()},
        "order": clock.order,
    }


class Recorded(PhaseClock):
    """Keeps the order of the phases as well."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.order: list[str] = []

    def end(self, phase: str) -> None:
        super().end(phase)
        self.order.append(phase)


SCHEDULES = ["gpipe", "one_f_one_b"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_forward_and_backward_get_the_time_of_their_own_chunks(ranks: int, tmp_path: Path) -> None:
    cells = [cell(ranks, f"pipeline_parallel={s}", *DEEP) for s in SCHEDULES]
    again = cell(ranks, "pipeline_parallel=one_f_one_b", *DEEP, "memory=recompute_blocks")
    blocks, parts = 8 // ranks, 4
    found = answers(booked, [*cells, again], tmp_path)
    for index, (name, of_ranks) in enumerate(found):
        recomputed = FORWARD if index == len(cells) else 0.0
        for of_rank in of_ranks:
            seconds = of_rank["seconds"]
            assert seconds["forward"] == pytest.approx(FORWARD * blocks * parts), name
            assert seconds["backward"] == pytest.approx((BACKWARD + recomputed) * blocks * parts)
            assert seconds["data"] == seconds["bubble"] == seconds["optimizer"] == 0
    if ranks == 2:  # the order of the chunks is that of the schedule
        (_, gpipe), (_, in_turns), _ = found
        assert [chunks(of_rank) for of_rank in gpipe] == ["FFFFBBBB", "FFFFBBBB"]
        assert [chunks(of_rank) for of_rank in in_turns] == ["FFBFBFBB", "FBFBFBFB"]


def chunks(of_rank: dict[str, Any]) -> str:
    """Forward and backward chunks in their order: each comes after a bubble, however short."""
    order = of_rank["order"][:-3]  # the last micro-batch, all gradients and the optimizer end
    pairs = pairwise(order)
    return "".join(phase[0].upper() for before, phase in pairs if before == "bubble")
