"""Gradients that are exchanged in bfloat16: half the bytes of float32."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitsweep.spec.technique import Sharding

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec

HALF_GRADIENTS = 1e-2
"""How far the loss of a short training may lie from that with float32 gradients (see `equivalence`)."""


def half_gradient_conflicts(
    sharding: Sharding, gradient_dtype: str, cell: "CellSpec"
) -> Iterator[str]:
    """Refuse a dtype for gradients that no other rank needs, or that are half precision anyway."""
    if cell.mesh.gradient_shares == 1:
        yield (
            f"`sharding.gradient_dtype={gradient_dtype}` saves nothing, since no two ranks exchange "
            "gradients: use `resources.ranks_per_node=2` or more, or `sharding.gradient_dtype=null`."
        )
    plan = cell.precision.plan()
    held = "float32" if sharding.shards_parameters and plan.master_weights else plan.param_dtype
    if held in ("float16", "bfloat16"):
        yield (
            f"`sharding.gradient_dtype={gradient_dtype}` makes gradients half as wide, and with "
            f"`sharding={sharding.name}` and `precision={cell.precision.name}` they are exchanged in "
            f"{held} already: use `sharding.gradient_dtype=null`."
        )
