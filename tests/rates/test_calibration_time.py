"""What is timed of operators: little of a format that the processor emulates, nothing after the time."""

import pytest
import torch

from tests.cells import LAPTOP, TINY, composer
from vitsweep.planning.sweep_plan import plan_cell
from vitsweep.predict import calibrate
from vitsweep.rates import operators
from vitsweep.rates.operators import LARGEST_FLOPS, SLOW_FLOPS, operator_times
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.world import World


def spec(*overrides: str) -> CellSpec:
    return plan_cell(composer().compose([*TINY, *overrides]), LAPTOP).spec


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(operators, "_median_us", lambda *_: 1.0)
    monkeypatch.setattr(operators, "ELEMENTS", {"cpu": (1 << 8,)})
    cell, device = spec(), torch.device("cpu")
    return World(rank=0, local_rank=0, size=1, device=device, shape=cell.mesh, mesh=None)


@pytest.mark.parametrize(
    ("slow", "most"), [(("bfloat16",), SLOW_FLOPS), ((), LARGEST_FLOPS["cpu"])]
)
def test_of_an_emulated_format_only_tiny_products_are_timed(
    world: World, slow: tuple[str, ...], most: float
) -> None:
    found = operator_times(world, ("bfloat16",), slow)
    products = [o["shape"] for o in found if o["kind"] == "matmul"]
    flops = [2 * shape[1] * shape[2] * shape[3] for shape in products]
    assert most / 10 < max(flops) <= most


def test_after_its_time_nothing_more_is_timed(world: World) -> None:
    assert operator_times(world, ("float32",), end=0.0) == []


def test_trainings_in_an_emulated_format_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"float32": 0.1, "bfloat16": 0.001}
    monkeypatch.setattr(calibrate, "calibration_for", lambda *_: rates)
    assert calibrate._slow_formats(spec()) == ("bfloat16",)
    rates["bfloat16"] = 0.05  # half as fast, but not emulated
    assert calibrate._slow_formats(spec()) == ()
    cells = [spec(f"precision={name}") for name in ("fp32", "O1", "bf16")]
    assert calibrate._without(("bfloat16",), cells) == cells[:1]
    assert calibrate._without((), cells) == cells
