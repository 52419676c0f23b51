"""No tensor parallelism."""

from dataclasses import dataclass

from vitsweep.spec.technique import TensorParallel


@dataclass(frozen=True, kw_only=True)
class NoTensorParallel(TensorParallel):
    """Every rank holds whole matrices."""
