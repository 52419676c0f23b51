"""Mixed and half precision after apex's optimisation levels O0-O3 (apex/amp/frontend.py)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import DType, Precision, PrecisionPlan


@dataclass(frozen=True, kw_only=True)
class OptLevel(Precision):
    """apex's properties, each overridable; `bf16`, `bf16_params` and
    `bf16_masters` are settings of the same.

    apex patches functions one by one; we use `torch.autocast`, whose list differs slightly (apex
    runs GELU in float32). apex's O2 exempts BatchNorm only, of which a ViT has none;
    `keep_norm_fp32` exempts LayerNorm, as pycls' FSDP.LAYER_NORM_FP32 does.

    Attributes:
        cast_model_type: None leaves parameters as they are, `float32`, or `half`.
        patch_torch_functions: run operations in `half_dtype` where that is safe (autocast).
        keep_norm_fp32: LayerNorm stays in float32 when the model is cast.
        master_weights: the optimizer updates a float32 copy.
        loss_scale: `dynamic`, a constant, or None. Resolved from auto: dynamic under float16, None
            under bfloat16, whose exponent is float32's.
        half_dtype: what "half" means; resolved from auto: float16 on CUDA, bfloat16 on CPU.
    """

    cast_model_type: Literal["float32", "half"] | None
    patch_torch_functions: bool
    keep_norm_fp32: bool
    master_weights: bool
    loss_scale: Annotated[float, Gt(0)] | Literal["dynamic"] | None
    half_dtype: Literal["float16", "bfloat16"]

    def plan(self) -> PrecisionPlan:
        """Translate apex's properties."""
        params: DType = self.half_dtype if self.cast_model_type == "half" else "float32"
        return PrecisionPlan(
            autocast_dtype=self.half_dtype if self.patch_torch_functions else None,
            param_dtype=params,
            norm_dtype="float32" if self.keep_norm_fp32 else params,
            master_weights=self.master_weights and params != "float32",
            loss_scale=self.loss_scale,
        )

    def relative_tolerance(self) -> float:
        """bfloat16 keeps 8 bits of mantissa, float16 keeps 11; O0 is float32."""
        if self.cast_model_type != "half" and not self.patch_torch_functions:
            return 1e-4
        return 5e-2 if self.half_dtype == "bfloat16" else 2e-2

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse the combinations that apex refuses, and loss scaling of half-precision gradients."""
        if self.cast_model_type is not None and self.patch_torch_functions:
            yield (
                f"`precision.cast_model_type={self.cast_model_type}` and "
                "`precision.patch_torch_functions=true` exclude each other: O1 patches functions, "
                "O2 and O3 cast the model."
            )
        if self.master_weights and self.cast_model_type != "half":
            yield (
                "`precision.master_weights=true` needs `precision.cast_model_type=half`: otherwise "
                "the parameters are float32 already."
            )
        if (
            self.loss_scale is not None
            and self.cast_model_type == "half"
            and not self.master_weights
        ):
            yield (
                f"`precision.loss_scale={self.loss_scale}` needs float32 gradients to unscale: use "
                "`precision.master_weights=true` (that is O2) or `precision.loss_scale=null`."
            )
