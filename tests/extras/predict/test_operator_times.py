"""What is timed of operators: a part of those that take long, nothing after the time."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitsweep.extras.predict import operators
from vitsweep.extras.predict.operators import operator_times
from vitsweep.extras.predict.step_time import BY_WEIGHT


@pytest.fixture(autouse=True)
def each_call_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_fastest_us", lambda work: 1.0 if work() is not None else 0.0)
    monkeypatch.setattr(operators, "ELEMENTS", (1 << 8,))
    monkeypatch.setattr(operators, "PARAMETERS", (1 << 8,))


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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Along the axis of tokens or images: 24 of 96, where a format is emulated that slowly."""
    for share, most in ((1, 1e9), (4, 2 * 24 * 8 * 16)):
        monkeypatch.setattr(operators, "_most_flops", lambda *_, most=most: most)
        counter = FlopCounterMode(display=False)
        with counter:
            found = operator_times(SHAPES, ())
        names = ["addmm", "mm", BY_WEIGHT, "bmm", "attention", "attention"]
        assert [row["name"] for row in found] == names
        assert [row["shape"] for row in found[:5]] == [shape for _, shape in SHAPES["float32"]]
        assert all(row["us"] == share for row in found[:3])
        products = 2 * 96 * 8 * 16 // share
        counted = counter.get_flop_counts()["Global"]
        assert counted[torch.ops.aten.addmm] == products
        assert counted[torch.ops.aten.mm] == 2 * products


def test_an_operator_that_the_device_lacks_in_a_format_is_left_out() -> None:
    shapes = {"bool": SHAPES["float32"][:1], **SHAPES}
    assert {row["dtype"] for row in operator_times(shapes, ())} == {"float32"}
