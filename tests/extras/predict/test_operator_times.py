"""What is timed of operators: a part of those that take long, nothing after the time."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.cells import LAPTOP, TINY, composer
from vitsweep.extras.predict import operators
from vitsweep.extras.predict.operators import operator_times
from vitsweep.extras.predict.step_time import BY_WEIGHT
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World


def spec(*overrides: str) -> CellSpec:
    return plan_cell(composer().compose([*TINY, *overrides]), LAPTOP).spec


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(operators, "_fastest_us", lambda work: 1.0 if work() is not None else 0.0)
    monkeypatch.setattr(operators, "ELEMENTS", (1 << 8,))
    monkeypatch.setattr(operators, "PARAMETERS", (1 << 8,))
    cell, device = spec(), torch.device("cpu")
    return World(rank=0, local_rank=0, size=1, device=device, shape=cell.mesh, mesh=None)


SHAPES = {
    "float32": [
        ("addmm", (1, 96, 8, 16)),
        ("mm", (1, 96, 16, 8)),
        (BY_WEIGHT, (1, 8, 16, 96)),
        ("bmm", (96, 4, 8, 16)),
        ("attention", (96, 1, 4, 8, 16)),
    ]
}


def test_of_products_that_take_long_a_part_is_timed_and_counted_for_the_whole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Along the axis of tokens or images: 24 of 96, where a format is emulated that slowly."""
    for share, most in ((1, 1e9), (4, 2 * 24 * 8 * 16)):
        monkeypatch.setattr(operators, "_most_flops", lambda *_, most=most: most)
        counter = FlopCounterMode(display=False)
        with counter:
            found = operator_times(world, SHAPES, ())
        names = ["addmm", "mm", BY_WEIGHT, "bmm", "attention", "attention"]
        assert [row["name"] for row in found] == names
        assert [row["shape"] for row in found[:5]] == [shape for _, shape in SHAPES["float32"]]
        assert all(row["us"] == share for row in found[:3])
        products = 2 * 96 * 8 * 16 // share
        counted = counter.get_flop_counts()["Global"]
        assert counted[torch.ops.aten.addmm] == products
        assert counted[torch.ops.aten.mm] == 2 * products


def test_an_operator_that_the_device_lacks_in_a_format_is_left_out(world: World) -> None:
    shapes = {"bool": SHAPES["float32"][:1], **SHAPES}
    assert {row["dtype"] for row in operator_times(world, shapes, ())} == {"float32"}
