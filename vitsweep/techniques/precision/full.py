"""Full precision: every tensor and every operation in one dtype."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Precision, PrecisionPlan


@dataclass(frozen=True, kw_only=True)
class FullPrecision(Precision):
    """One dtype throughout; TensorFloat-32 in matrix products only where it is asked for.

    Attributes:
        dtype: float32, or float64 for proofs of equality.
        tf32: allow TF32 in matmul and cuDNN (10 bits of mantissa, Ampere and newer).
    """

    dtype: Literal["float32", "float64"]
    tf32: bool

    def plan(self) -> PrecisionPlan:
        """Return one dtype for everything."""
        return PrecisionPlan(param_dtype=self.dtype, norm_dtype=self.dtype, tf32=self.tf32)

    def relative_tolerance(self) -> float:
        """Rounding of sums taken in another order; TF32 keeps three decimal digits."""
        if self.tf32:
            return 1e-2
        return 1e-10 if self.dtype == "float64" else 1e-4

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse TF32 without an NVIDIA GPU, and in float64."""
        if self.tf32 and cell.resources.device == "cpu":
            yield (
                "`precision.tf32=true` needs an NVIDIA GPU (Ampere or newer), and this cell has "
                "`resources.device=cpu`: use `precision.tf32=false`, or `precision=bf16`."
            )
        if self.tf32 and self.dtype == "float64":
            yield "`precision.tf32=true` needs `precision.dtype=float32`."
