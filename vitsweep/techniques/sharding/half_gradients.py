"""Gradients that are exchanged in bfloat16 (half the bytes of float32), and in buckets."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal, Self

from annotated_types import Gt

from vitsweep.spec.technique import Sharding

if TYPE_CHECKING:
    from vitsweep.spec.cell_spec import CellSpec

HALF_GRADIENTS = 1e-2
"""How far the loss of a short training may lie from that with float32 gradients (see `equivalence`)."""
TWIN_BUCKET_MIB = 0.125
"""A nano twin has some 40,000 parameters: three buckets in float64, two in float32."""


@dataclass(frozen=True, kw_only=True)
class BucketedReplicas(Sharding):
    """Every rank holds all parameters; gradients are exchanged in buckets during the backward pass.

    Attributes:
        bucket_mib: size of a bucket.
        gradient_dtype: in which gradients are exchanged; None leaves them as they are.
    """

    bucket_mib: Annotated[float, Gt(0)]
    gradient_dtype: Literal["bfloat16"] | None

    def of_twin(self) -> Self:
        """Exchange the gradients of a nano model in several buckets."""
        return replace(self, bucket_mib=min(self.bucket_mib, TWIN_BUCKET_MIB))

    def relative_tolerance(self) -> float:
        """Gradients in bfloat16 keep 8 bits of mantissa."""
        return HALF_GRADIENTS if self.gradient_dtype else 0.0

    def conflicts(self, cell: "CellSpec") -> Iterator[str]:
        """Refuse a dtype for gradients that are half precision anyway."""
        if self.gradient_dtype is not None:
            yield from half_gradient_conflicts(self, self.gradient_dtype, cell)


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
