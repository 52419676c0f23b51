"""FP8 training of the linear layers (Micikevicius et al., arXiv:2209.05433), through torchao."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Literal

from vitsweep.spec.cell_spec import CellSpec
from vitsweep.spec.technique import Precision, PrecisionPlan

if TYPE_CHECKING:
    from torch import nn

WIDTH_MULTIPLE = 16
"""FP8 matrix units take operands whose sides are multiples of it."""


@dataclass(frozen=True, kw_only=True)
class Float8(Precision):
    """The blocks' linears multiply in float8 with dynamic scales; all else is bfloat16 autocast.

    Parameters, gradients and optimizer state stay float32. The patch embedding and the head are
    left out: they are small and decide the accuracy.

    Attributes:
        recipe: `tensorwise` takes one scale per tensor; `rowwise` one per row, slower and safer
            with outliers.
        emulate: compute in float32 what float8 would give, for devices without FP8 units.
    """

    recipe: Literal["tensorwise", "rowwise"]
    emulate: bool

    float8: ClassVar[bool] = True

    def plan(self) -> PrecisionPlan:
        """Autocast for what is not swapped; emulation computes in float32."""
        return PrecisionPlan(autocast_dtype=None if self.emulate else "bfloat16")

    def relative_tolerance(self) -> float:
        """float8 e4m3 keeps three bits of mantissa."""
        return 1e-1

    def convert(self, model: "nn.Module") -> "nn.Module":
        """Swap the linears inside the blocks."""
        import torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        if self.emulate:
            config = Float8LinearConfig(emulate=True)
        else:
            config = Float8LinearConfig.from_recipe_name(self.recipe)

        def is_inside_a_block(module: torch.nn.Module, name: str) -> bool:
            return isinstance(module, torch.nn.Linear) and name.startswith("blocks.")

        converted: torch.nn.Module = convert_to_float8_training(
            model, config=config, module_filter_fn=is_inside_a_block
        )
        return converted

    def conflicts(self, cell: CellSpec) -> Iterator[str]:
        """Refuse what lacks torchao, widths that are multiples of 16, or FP8 units."""
        if find_spec("torchao") is None:
            yield (
                f"`precision={self.name}` needs torchao: `pip install 'vitsweep[fp8]'`, or use "
                "`precision=bf16`."
            )
        for knob in ("width", "mlp_width"):
            size = getattr(cell.transformer, knob)
            if size % WIDTH_MULTIPLE:
                yield (
                    f"`precision={self.name}` needs `model.{knob}` divisible by {WIDTH_MULTIPLE}; got "
                    f"{size}: try `model.{knob}={round(size / WIDTH_MULTIPLE) * WIDTH_MULTIPLE or 16}`."
                )
        if self.emulate and self.recipe != "tensorwise":
            yield "`precision.emulate=true` knows `precision.recipe=tensorwise` only."
        if cell.resources.device == "cpu" and not self.emulate:
            yield (
                f"`precision={self.name}` needs a GPU with FP8 units (Hopper, Ada or newer), and this "
                "cell has `resources.device=cpu`: use `precision.emulate=true` to see its rounding, "
                "not its speed."
            )
