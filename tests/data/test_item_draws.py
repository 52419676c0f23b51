"""What an item of a user's draws follows from seed, split, epoch and item, whoever reads it."""

import random
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.cells_and_worlds import world
from tests.data.test_module_data import planned
from tests.user_data import SHOWN
from vitsweep.data.module_data import _INSPECTED
from vitsweep.spec.generators import kept_generators, seeded_generators

HELD_OUT = "++data.test_arguments.part=test"
OWN = slice(SHOWN - 5, SHOWN)
"""Seed and four numbers of an item; before them its index."""


def opened(*overrides: str, rank: int = 0, ranks: int = 1) -> Any:
    target, *others = overrides or ("Drawing", HELD_OUT)
    cell = planned(target, f"resources.ranks_per_node={ranks}", *others).spec
    return cell.data.open(cell, world(rank, **asdict(cell.mesh)))


def drawn(*streams: Iterator[tuple[Tensor, Tensor]]) -> dict[int, list[float]]:
    """Return index -> all that an item drew, of items that are read once."""
    rows = [
        image.flatten().tolist() for stream in streams for images, _ in stream for image in images
    ]
    found = {int(row[0]): row[1:SHOWN] + row[-1:] for row in rows}
    assert len(found) == len(rows)
    return found


def apart(one: dict[int, list[float]], other: dict[int, list[float]]) -> bool:
    """Whether each item drew other numbers, of each of the generators."""
    return all(a != b for i in one for a, b in zip(one[i][:-1], other[i][:-1], strict=True))


@pytest.fixture(scope="module")
def wanted() -> list[dict[int, list[float]]]:
    """Epochs 0, 1 and 2 and the held-out images of one rank that reads itself."""
    batches = opened()
    return [*(drawn(batches.train(epoch)) for epoch in range(3)), drawn(batches.test())]


def test_ranks_and_resumed_trainings_draw_what_one_rank_draws(wanted: Any) -> None:
    halves = [opened(rank=rank, ranks=2) for rank in (0, 1)]
    assert [drawn(*(half.train(epoch) for half in halves)) for epoch in range(3)] == wanted[:3]
    assert drawn(*(half.test() for half in halves)) == wanted[3]
    sequence = ("Drawing", HELD_OUT, "sequence_parallel=ulysses")
    sharing = [opened(*sequence, rank=rank, ranks=2) for rank in (0, 1)]
    assert [drawn(each.train(1)) for each in sharing] == [wanted[1]] * 2
    resumed = drawn(opened().train(1, first=2))
    assert resumed == {index: wanted[1][index] for index in resumed}
    assert len(resumed) == 32


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_draw_what_the_rank_draws(wanted: Any, workers: int) -> None:
    batches = opened("Drawing", HELD_OUT, f"data.num_workers={workers}")
    try:
        found = [drawn(batches.train(epoch)) for epoch in (0, 1)]  # past the border of the epoch
        assert [*found, drawn(batches.test())] == [*wanted[:2], wanted[3]]
        assert drawn(batches.train(0)) == wanted[0]  # started anew
    finally:
        batches.close()


def test_seeds_epochs_items_and_splits_draw_separately(wanted: Any) -> None:
    other = opened("Drawing", HELD_OUT, "seed=1")
    assert apart(drawn(other.train(0)), wanted[0])
    assert apart(wanted[0], wanted[1])
    assert apart(wanted[0], wanted[3])
    for numbers in zip(*wanted[0].values(), strict=True):
        assert len(set(numbers)) == len(numbers)


def test_a_factory_draws_alike_for_both_splits_and_from_the_seed(wanted: Any) -> None:
    """So that one split may be what a permutation leaves over of the other."""
    train, test = ({row[-1] for row in wanted[place].values()} for place in (0, 3))
    assert train | test == set(range(128))
    assert {row[-1] for row in drawn(opened("Drawing", "seed=1").train(0)).values()} != train


def test_reading_leaves_the_numbers_of_dropout_as_they_are() -> None:
    def drawn_between(*overrides: str) -> list[list[float]]:
        batches = opened(*overrides)
        with seeded_generators(3, "model"):
            found = [
                [random.random(), np.random.rand(), float(torch.rand(1))]
                for _ in (*batches.train(0), *batches.test())
            ]
        batches.close()
        return found

    inside = drawn_between()
    assert inside == drawn_between("Drawing", HELD_OUT, "data.num_workers=1")


def test_a_plan_leaves_the_generators_of_its_caller_as_they_are() -> None:
    with kept_generators():
        _INSPECTED.clear()
        found = []
        for look in (lambda: None, lambda: planned("Drawing", HELD_OUT)):
            with seeded_generators(4, "caller"):
                look()
                found.append((random.random(), np.random.rand(), float(torch.rand(1))))
    assert found[0] == found[1]


def test_a_generator_made_by_the_data_set_is_its_own_matter(wanted: Any) -> None:
    """`draws` seeds one from `torch.initial_seed()` inside of `__getitem__`, which follows from the item."""
    private = ("Drawing", "++data.arguments.private=true")
    one, two = (drawn(opened(*private).train(0)) for _ in range(2))
    assert {i: row[:-1] for i, row in one.items()} == {i: row[:-1] for i, row in wanted[0].items()}
    assert all(one[index][-1] != two[index][-1] for index in one)
