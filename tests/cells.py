"""Cells from the real conf/, small enough for tests."""

from dataclasses import replace
from functools import cache

from vitsweep.composition.composer import Composer
from vitsweep.planning.sweep_plan import PlannedCell, plan_cell
from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.resources import HERE, Machine

LAPTOP = Machine(device="cpu", cores_per_node=2, devices_per_node=0, described_by="tests")
THIS_LAPTOP = replace(LAPTOP, described_by=HERE)
"""As `LAPTOP`, but what a cell needs is looked up on the machine of the tests."""
GPU_NODE = Machine(device="cuda", cores_per_node=64, devices_per_node=8, described_by="tests")

TINY = (
    "model.depth=2",
    "model.width=32",
    "model.num_heads=4",
    "model.mlp_width=64",
    "batch.images_per_step=16",
)
"""A ViT whose step takes milliseconds."""


@cache
def composer() -> Composer:
    """The composer over the real conf/, shared by all tests."""
    return Composer()


def entry(*overrides: str, machine: Machine = LAPTOP) -> PlannedCell:
    """Compose, resolve, type and check one cell."""
    return plan_cell(composer().compose(list(overrides)), machine)


def cell(*overrides: str, machine: Machine = LAPTOP) -> CellSpec:
    """Return the spec of one tiny cell."""
    return entry(*TINY, *overrides, machine=machine).spec
